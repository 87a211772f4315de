"""What a device's own counters say: PyTorch's allocator on CUDA, the process on the host. Nothing waits for
the device."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from typing import Any

import psutil


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """Counters at one moment.

    Attributes:
        allocated_bytes: blocks in use by tensors; on the CPU, the memory of the process (RSS).
        peak_allocated_bytes: the most since the process began, or since the script reset it.
        reserved_bytes, peak_reserved_bytes: what PyTorch's allocator took from the device; 0 on the CPU.
        requested_bytes, peak_requested_bytes: what tensors asked for; 0 on the CPU.
        alloc_retries: how often the allocator had to give its cache back to serve a request.
        ooms: how often it could not serve one.
        total_bytes: the device's memory, or the host's.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    requested_bytes: int = 0
    peak_requested_bytes: int = 0
    alloc_retries: int = 0
    ooms: int = 0
    total_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)


def read_device(device_type: str) -> DeviceReading | None:
    """The counters of the current device; None where CUDA has not been used yet."""
    return _read_cuda() if device_type == "cuda" else _read_host()


def _read_host() -> DeviceReading:
    resident = int(psutil.Process().memory_info().rss)
    return DeviceReading(
        allocated_bytes=resident,
        peak_allocated_bytes=max(resident, _peak_resident_bytes()),
        total_bytes=int(psutil.virtual_memory().total),
    )


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _read_cuda() -> DeviceReading | None:
    import torch

    if not torch.cuda.is_initialized():
        return None
    counters = torch.cuda.memory_stats_as_nested_dict()
    if not counters:
        return None

    def bytes_of(name: str, which: str) -> int:
        found: Any = counters.get(f"{name}_bytes", {})
        return int(found.get("all", {}).get(which, 0))

    return DeviceReading(
        allocated_bytes=bytes_of("allocated", "current"),
        peak_allocated_bytes=bytes_of("allocated", "peak"),
        reserved_bytes=bytes_of("reserved", "current"),
        peak_reserved_bytes=bytes_of("reserved", "peak"),
        requested_bytes=bytes_of("requested", "current"),
        peak_requested_bytes=bytes_of("requested", "peak"),
        alloc_retries=int(counters.get("num_alloc_retries", 0)),
        ooms=int(counters.get("num_ooms", 0)),
        total_bytes=int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory),
    )


MOST_HISTORY = 500_000
"""Entries that PyTorch's allocator history keeps, the latest ones."""


def record_history(on: bool) -> None:
    """Switch PyTorch's own allocator history of CUDA on, with the Python lines, or off again."""
    import torch

    if on:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=MOST_HISTORY
        )
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def history_pickle() -> bytes:
    """PyTorch's memory snapshot with the history so far, as ``memory_viz`` and ``memfit replay`` read it."""
    import torch

    return pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
