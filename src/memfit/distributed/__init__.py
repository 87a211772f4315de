"""Several ranks: memory over them, state kept in step, work balanced, a lost rank survived.

Built on ``torch.distributed`` as it is (DTensor, FSDP2, distributed checkpoints, the elastic launcher):
gloo on the CPU, nccl on GPUs. What one rank needs is predicted by `memfit.dry_run` (``world_size``).
"""

from __future__ import annotations

from memfit.distributed.agreement import Agreement, compare_with_one_process
from memfit.distributed.balance import Assignment, Balance, Device
from memfit.distributed.data_order import DataOrder
from memfit.distributed.fault_tolerance import FaultTolerance
from memfit.distributed.load_balancing import LoadBalancing, measured_balance, measured_speeds
from memfit.distributed.memory import DistributedMemory
from memfit.distributed.memory_state import MemoryStatistics, OutOfDistributedMemory
from memfit.distributed.sharding import ShardedBlock
from memfit.distributed.synchronization import MemorySynchronization, Synchronized
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
    "ShardedBlock",
    "Synchronized",
    "compare_with_one_process",
    "measured_balance",
    "measured_speeds",
    "wrap",
]
