"""PyTorch's own compiled caching allocator, run on the made-up GPU: what it makes of a list of operations.

`RealAllocator` is for tests. It has one process with torch loaded; each trace runs in a fresh fork of it,
since an allocator cannot be reset. `run_operations` is what the fork runs; only there is torch imported.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace as with_changes
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from memfit.core.devices import GPU, find_gpu
from memfit.dryrun.worker import Worker

_TIMEOUT_SECONDS = 60.0
_STATES = {"active_allocated": "A", "active_pending_free": "P", "inactive": "I"}
_POOLS = {"all": "all", "small_pool": "small", "large_pool": "large"}
_FIGURES = ("current", "peak", "allocated", "freed")


def device_of(total_bytes: int) -> GPU:
    """A GPU of which all of the memory is the allocator's."""
    return with_changes(find_gpu("a100-80gb"), runtime_total_bytes=total_bytes, context_bytes=0)


class RealAllocator:
    """Runs traces through the allocator of the installed torch; a context manager."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the worker finds this module
            patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # running out of memory is no news here
            self._worker = Worker(device_of(1 << 30))

    def __enter__(self) -> RealAllocator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def run(
        self,
        operations: Sequence[dict[str, Any]],
        *,
        total_bytes: int,
        fraction: float | None,
        settings: str,
    ) -> dict[str, Any]:
        """The result under ``settings`` (the text of PYTORCH_ALLOC_CONF); keys as of the golden files."""
        result: dict[str, Any] = self._worker.call(
            "real_allocator:run_operations",
            gpu=device_of(total_bytes),
            timeout_seconds=_TIMEOUT_SECONDS,
            operations=list(operations),
            fraction=fraction,
            settings=settings,
        )
        return result


def run_operations(operations: list[dict[str, Any]], fraction: float | None, settings: str) -> dict[str, Any]:
    """In the fork: does what the operations say. torch reads its settings when CUDA is first used."""
    os.environ.update({"MEMFIT_EVENTS": "manual", "PYTORCH_ALLOC_CONF": settings})
    import torch

    torch.cuda.init()
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    run = _Run(operations)
    for index, operation in enumerate(operations):
        run.step(index, operation)
    return run.result()


class _Run:
    def __init__(self, operations: list[dict[str, Any]]) -> None:
        import torch

        self._torch = torch
        last = max((operation.get("stream", 0) for operation in operations), default=0)
        self._streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(last))]
        # Only the memory of a tensor can be recorded on a stream.
        self._recorded = {each["id"] for each in operations if each["op"] == "record_stream"}
        self._live: dict[int, Any] = {}
        self._pools: dict[int, Any] = {}
        self._pool_numbers: dict[tuple[int, int], int] = {(0, 0): 0}
        self._placements: list[int] = []
        self._reserved: list[list[int]] = []
        self._reserved_bytes = 0
        self._ooms: list[int] = []

    def step(self, index: int, operation: dict[str, Any]) -> None:
        cuda = self._torch.cuda
        match operation["op"]:
            case "alloc":
                self._alloc(index, operation)
            case "free":
                memory = self._live.pop(operation["id"], None)
                if isinstance(memory, int):
                    cuda.caching_allocator_delete(memory)
                del memory
            case "record_stream":
                if operation["id"] in self._live:
                    self._live[operation["id"]].record_stream(self._streams[operation["stream"]])
            case "release_pool":
                self._pool(operation["pool"])
                del self._pools[operation["pool"]]
            case "sync":
                cuda.synchronize()
            case "empty_cache":
                cuda.empty_cache()
            case "reset_peak":
                cuda.reset_peak_memory_stats()
            case other:
                raise ValueError(f"unknown op {other!r}")
        now = self._torch._C._cuda_memoryStats(0)["reserved_bytes"]["all"]["current"]
        if now != self._reserved_bytes:
            self._reserved_bytes = now
            self._reserved.append([index, now])

    def _alloc(self, index: int, operation: dict[str, Any]) -> None:
        cuda, size = self._torch.cuda, operation["size"]
        stream = self._streams[operation.get("stream", 0)]
        try:
            if operation["id"] in self._recorded and not operation.get("pool"):
                with cuda.stream(stream):
                    memory = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
                address = memory.data_ptr()
            elif operation.get("pool"):
                with cuda.stream(stream), cuda.use_mem_pool(self._pool(operation["pool"])):
                    memory = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
                address = memory.data_ptr()
            else:
                memory = address = cuda.caching_allocator_alloc(size, 0, stream)
        except self._torch.OutOfMemoryError:
            self._ooms.append(index)
            self._placements += [-1, 0]
            return
        self._live[operation["id"]] = memory
        self._placements += _place(address)

    def _pool(self, number: int) -> Any:
        """A private pool by its number, made when it is first named."""
        if number not in self._pools:
            self._pools[number] = self._torch.cuda.MemPool()
            self._pool_numbers[tuple(self._pools[number].id)] = number
        return self._pools[number]

    def result(self) -> dict[str, Any]:
        return {
            "placements": self._placements,
            "reserved": self._reserved,
            "ooms": self._ooms,
            "stats": _stats(self._torch._C._cuda_memoryStats(0)),
            "segments": self._segments(),
        }

    def _segments(self) -> list[dict[str, Any]]:
        numbers = {stream.cuda_stream: number for number, stream in enumerate(self._streams)}
        found = sorted(self._torch.cuda.memory_snapshot(), key=lambda segment: segment["address"])
        return [
            _segment(
                segment, numbers[segment["stream"]], self._pool_numbers[tuple(segment["segment_pool_id"])]
            )
            for segment in found
        ]


def _segment(segment: dict[str, Any], stream: int, private_pool: int) -> dict[str, Any]:
    start = segment["address"]
    region, offset = _place(start)
    return {
        "range": region,
        "offset": offset,
        "size": segment["total_size"],
        "pool": segment["segment_type"],
        **({"private_pool": private_pool} if private_pool else {}),
        "stream": stream,
        "expandable": segment["is_expandable"],
        "allocated": segment["allocated_size"],
        "active": segment["active_size"],
        "requested": segment["requested_size"],
        "blocks": [
            [block["address"] - start, block["size"], block["requested_size"], _STATES[block["state"]]]
            for block in segment["blocks"]
        ],
    }


def _place(address: int) -> list[int]:
    """Which range of the device an address is in, counted in the order in which they were made, and where."""
    find = ctypes.CDLL(None).memfit_range
    find.restype, find.argtypes = ctypes.c_long, [ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]
    base = ctypes.c_size_t()
    region = find(address, ctypes.byref(base))
    return [region, address - base.value] if region >= 0 else [-1, 0]


def _stats(told: dict[str, Any]) -> dict[str, Any]:
    """``{name: {"all" | "small" | "large": [current, peak, allocated, freed]}}`` and plain numbers."""
    stats: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, int):
            stats[name] = value
        elif "current" in value:
            stats[name] = [value[figure] for figure in _FIGURES]
        elif "all" in value:
            stats[name] = {
                short: [value[pool][figure] for figure in _FIGURES] for pool, short in _POOLS.items()
            }
    return stats
