"""PyTorch's caching allocator in this process: counters that it keeps anyway, read without synchronising.

PyTorch is never imported and CUDA never initialised here: where the program has not done so, there is
nothing to see. Reading the counters takes some 20 µs. How the free memory of the cache is cut up needs a walk
over all blocks, which takes far longer; it is repeated only so often that it stays within `WALK_SHARE` of the
time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from memfit.monitor.identity import Identity, identify
from memfit.monitor.samples import AllocatorSample, Sample, Site

WALK_SHARE = 0.002
"""The most of a process's time that walks over its blocks may take."""
MOST_SITES = 30
_FREE = "inactive"


class TorchAllocatorSource:
    """Reads the allocator of every CUDA device that this process uses.

    Args:
        identity: whose it is; found out where not given.
        walk_share: see `WALK_SHARE`; 0 for never.
    """

    name = "PyTorch's allocator"

    def __init__(self, identity: Identity | None = None, *, walk_share: float = WALK_SHARE) -> None:
        self.identity = identity or identify()
        self._walk_share = walk_share
        self._walks: dict[int, _Walk] = {}
        self._uuids: dict[int, tuple[str, int]] = {}

    def read(self, now_seconds: float) -> Sample:
        """One allocator per device; a note while there is none."""
        cuda = _cuda()
        if cuda is None:
            return Sample(time_seconds=now_seconds, notes=("this process has not used CUDA so far",))
        return Sample(time_seconds=now_seconds, allocators=tuple(self._used_devices(cuda)))

    def close(self) -> None:
        """Nothing is held open."""

    def _used_devices(self, cuda: Any) -> Iterable[AllocatorSample]:
        for index in range(cuda.device_count()):
            stats = cuda.memory_stats_as_nested_dict(index)
            if stats and (stats["segment"]["all"]["allocated"] or index == cuda.current_device()):
                yield self._device(cuda, index, stats)

    def _device(self, cuda: Any, index: int, stats: Mapping[str, Any]) -> AllocatorSample:
        uuid, total = self._device_facts(cuda, index)
        walk = self._walk(cuda, index)
        who = self.identity
        peaks = {name: stats[f"{name}_bytes"]["all"]["peak"] for name in ("allocated", "reserved")}
        levels: dict[str, Any] = {f"{name}_bytes": _current(stats, f"{name}_bytes") for name in _BYTES}
        counts: dict[str, Any] = {
            "segments": stats["segment"]["all"]["current"],
            "live_blocks": stats["allocation"]["all"]["current"],
            "alloc_retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
            "device_allocs": stats.get("num_device_alloc"),
            "device_frees": stats.get("num_device_free"),
            "allocated_total_bytes": stats["allocated_bytes"]["all"]["allocated"],
        }
        return AllocatorSample(
            job=who.job,
            rank=who.rank,
            local_rank=who.local_rank,
            world_size=who.world_size,
            pid=os.getpid(),
            host=who.host,
            index=index,
            uuid=uuid,
            total_bytes=total,
            **levels,
            allocated_by_pool={
                pool: int(stats["allocated_bytes"][f"{pool}_pool"]["current"]) for pool in ("small", "large")
            },
            allocated_peak_bytes=int(peaks["allocated"]),
            reserved_peak_bytes=int(peaks["reserved"]),
            **counts,
            free_cached_bytes=walk.free_bytes if walk else None,
            largest_free_bytes=walk.largest_free_bytes if walk else None,
            sites=walk.sites if walk else (),
            unknown={} if walk else {"largest_free_bytes": "the blocks have not been walked over yet"},
        )

    def _device_facts(self, cuda: Any, index: int) -> tuple[str, int]:
        """UUID as the driver writes it, and all memory that the runtime offers: asked once."""
        if index not in self._uuids:
            properties = cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)
            self._uuids[index] = (f"GPU-{uuid}" if uuid else "", int(properties.total_memory))
        return self._uuids[index]

    def _walk(self, cuda: Any, index: int) -> _Walk | None:
        """The last walk over the device's blocks, made anew when it is old enough for what it costs."""
        now = time.monotonic()
        last = self._walks.get(index)
        if self._walk_share <= 0 or (last and now < last.due_seconds):
            return last
        segments = _segments(cuda, index)
        took = time.monotonic() - now
        self._walks[index] = _Walk(segments, due_seconds=now + took / self._walk_share)
        return self._walks[index]


_BYTES = ("requested", "allocated", "active", "reserved", "inactive_split")


def _current(stats: Mapping[str, Any], name: str) -> int | None:
    return int(stats[name]["all"]["current"]) if name in stats else None


def _cuda() -> Any:
    """``torch.cuda`` where this process has loaded it and uses it, else None."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and getattr(cuda, "is_initialized", bool)() else None


def _segments(cuda: Any, index: int) -> list[dict[str, Any]]:
    """The allocator's segments on one device, without the history of events."""
    segments: Iterable[dict[str, Any]]
    try:
        segments = cuda.memory_snapshot(include_traces=False)
    except TypeError:  # PyTorch before 2.11
        segments = cuda.memory_snapshot()
    return [segment for segment in segments if segment["device"] == index]


class _Walk:
    """What a walk over all blocks of a device found."""

    def __init__(self, segments: Iterable[Mapping[str, Any]], *, due_seconds: float) -> None:
        self.due_seconds = due_seconds
        self.free_bytes = 0
        self.largest_free_bytes = 0
        held: dict[str, tuple[int, int]] = {}
        for segment in segments:
            for block in segment["blocks"]:
                size = int(block["size"])
                if block["state"] == _FREE:
                    self.free_bytes += size
                    self.largest_free_bytes = max(self.largest_free_bytes, size)
                elif block.get("frames"):
                    where = _place(block["frames"])
                    total, count = held.get(where, (0, 0))
                    held[where] = total + size, count + 1
        largest = sorted(held.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_SITES]
        self.sites = tuple(
            Site(where=where, held_bytes=total, block_count=count) for where, (total, count) in largest
        )


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost frame that is not of an installed package, as ``"train.py:12 main"``."""
    first = ""
    for frame in frames:
        file = str(frame.get("filename", ""))
        text = f"{os.path.basename(file)}:{frame.get('line', 0)} {frame.get('name', '')}"
        first = first or text
        if file and "site-packages" not in file and not file.startswith("<") and "/memfit/" not in file:
            return text
    return first
