"""Several ranks: memory over them, state kept in step, work balanced, a lost rank survived.

Built on ``torch.distributed`` as it is (DTensor, FSDP2, distributed checkpoints, the elastic launcher):
gloo on the CPU, nccl on GPUs. What one rank needs is predicted by `memfit.dry_run` (``world_size``).

Names are imported when they are first used: balancing needs no torch, and a rank begins sooner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.distributed.agreement import Agreement, compare_with_one_process
    from memfit.distributed.balance import Assignment, Balance, Device
    from memfit.distributed.data_order import DataOrder
    from memfit.distributed.fault_tolerance import FaultTolerance
    from memfit.distributed.load_balancing import LoadBalancing, measured_balance, measured_speeds
    from memfit.distributed.memory import DistributedMemory
    from memfit.distributed.memory_state import MemoryStatistics, OutOfDistributedMemory
    from memfit.distributed.scaling import scale
    from memfit.distributed.scaling_values import ScaleCase, ScaleResult
    from memfit.distributed.sharding import ShardedBlock
    from memfit.distributed.synchronization import MemorySynchronization, Synchronized
    from memfit.distributed.verification import VerifiedOnRanks, verify
    from memfit.distributed.wrapping import wrap

__all__ = [
    "Agreement",
    "Assignment",
    "Balance",
    "DataOrder",
    "Device",
    "DistributedMemory",
    "FaultTolerance",
    "LoadBalancing",
    "MemoryStatistics",
    "MemorySynchronization",
    "OutOfDistributedMemory",
    "ScaleCase",
    "ScaleResult",
    "ShardedBlock",
    "Synchronized",
    "VerifiedOnRanks",
    "compare_with_one_process",
    "measured_balance",
    "measured_speeds",
    "scale",
    "verify",
    "wrap",
]

_HOME = {
    "agreement": ("Agreement", "compare_with_one_process"),
    "balance": ("Assignment", "Balance", "Device"),
    "data_order": ("DataOrder",),
    "fault_tolerance": ("FaultTolerance",),
    "load_balancing": ("LoadBalancing", "measured_balance", "measured_speeds"),
    "memory": ("DistributedMemory",),
    "memory_state": ("MemoryStatistics", "OutOfDistributedMemory"),
    "scaling": ("scale",),
    "scaling_values": ("ScaleCase", "ScaleResult"),
    "sharding": ("ShardedBlock",),
    "synchronization": ("MemorySynchronization", "Synchronized"),
    "verification": ("VerifiedOnRanks", "verify"),
    "wrapping": ("wrap",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfit.distributed' has no attribute {name!r}")
    value = getattr(import_module(f"memfit.distributed.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
