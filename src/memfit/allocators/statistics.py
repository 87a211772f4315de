"""The books of the caching allocator, in the layout of ``torch.cuda.memory_stats``."""

# ruff: noqa: PLR1730  -- max() costs three times the comparison, and this is the inner loop of replays

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.allocators.chunks import Counters
from memfit.allocators.settings import UNLIMITED_BYTES

if TYPE_CHECKING:
    from memfit.allocators.caching import CachingAllocator


class Gauge:
    """One number that goes up and down: current, peak, and the sums of both directions."""

    __slots__ = ("current", "freed", "gained", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.gained = self.freed = 0

    def add(self, change: int) -> None:
        self.current += change
        self.peak = max(self.peak, self.current)
        if change > 0:
            self.gained += change
        else:
            self.freed -= change

    def as_list(self) -> list[int]:
        return [self.current, self.peak, self.gained, self.freed]


@dataclass(slots=True)
class Peaks:
    """Highest values seen of one scope: the small pool, the large one, or both together."""

    count: int = 0
    bytes: int = 0
    requested: int = 0
    active_count: int = 0
    active_bytes: int = 0
    reserved: int = 0
    segments: int = 0
    split_count: int = 0
    split_bytes: int = 0


class StatsBook:
    """Peaks and plain counts of one allocator. Peaks are noted when totals begin to fall."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._small, self._large, self._all = Peaks(), Peaks(), Peaks()
        self.oversize_allocations = Gauge()
        self.oversize_segments = Gauge()
        self.retries = self.ooms = self.rejections = self.syncs = self.device_allocs = self.device_frees = 0

    @property
    def peak_reserved_bytes(self) -> int:
        return self._all.reserved

    @property
    def peak_allocated_bytes(self) -> int:
        self.note_peaks()
        return self._all.bytes

    @property
    def peak_requested_bytes(self) -> int:
        self.note_peaks()
        return self._all.requested

    def note_peaks(self) -> None:
        """Note counts and bytes of blocks; to be called before any of them falls."""
        allocator = self._allocator
        allocator.rising = False
        small, large = allocator.small, allocator.large
        _raise_to(
            self._small, small.count, small.bytes, small.requested, small.pending_count, small.pending_bytes
        )
        _raise_to(
            self._large, large.count, large.bytes, large.requested, large.pending_count, large.pending_bytes
        )
        _raise_to(
            self._all,
            small.count + large.count,
            small.bytes + large.bytes,
            small.requested + large.requested,
            small.pending_count + large.pending_count,
            small.pending_bytes + large.pending_bytes,
        )

    def note_split(self, counters: Counters) -> None:
        """Note the free parts of split segments, after a rise in one pool."""
        allocator = self._allocator
        own = self._small if counters is allocator.small else self._large
        if counters.split_bytes > own.split_bytes:
            own.split_bytes = counters.split_bytes
        if counters.split_count > own.split_count:
            own.split_count = counters.split_count
        both = self._all
        if (found := allocator.small.split_bytes + allocator.large.split_bytes) > both.split_bytes:
            both.split_bytes = found
        if (found := allocator.small.split_count + allocator.large.split_count) > both.split_count:
            both.split_count = found

    def note_segments(self, counters: Counters) -> None:
        """Note the number of segments, after a new one."""
        allocator = self._allocator
        own = self._small if counters is allocator.small else self._large
        own.segments = max(own.segments, counters.segments)
        self._all.segments = max(self._all.segments, allocator.small.segments + allocator.large.segments)

    def note_reserved(self, counters: Counters) -> None:
        """Note the reserved bytes, after a rise."""
        allocator = self._allocator
        own = self._small if counters is allocator.small else self._large
        own.reserved = max(own.reserved, counters.reserved)
        self._all.reserved = max(self._all.reserved, allocator.reserved_bytes)

    def reset_peaks(self) -> None:
        """Peaks start again from the current values (``torch.cuda.reset_peak_memory_stats``)."""
        self._small, self._large, self._all = Peaks(), Peaks(), Peaks()
        self.note_peaks()
        for counters in (self._allocator.small, self._allocator.large):
            self.note_split(counters)
            self.note_segments(counters)
            self.note_reserved(counters)
        for gauge in (self.oversize_allocations, self.oversize_segments):
            gauge.peak = gauge.current

    def report(self) -> dict[str, Any]:
        """Everything: ``{name: {"all" | "small" | "large": [current, peak, allocated, freed]}}``, numbers."""
        self.note_peaks()
        allocator = self._allocator
        limit = allocator.settings.max_split_size_bytes
        groups: dict[str, dict[str, list[int]]] = {}
        for scope, peaks, counters in (
            ("small", self._small, allocator.small),
            ("large", self._large, allocator.large),
        ):
            for name, row in _rows(counters, peaks).items():
                groups.setdefault(name, {"all": [0, 0, 0, 0]})[scope] = row
        for name, peak in _peaks_by_name(self._all).items():
            small, large = groups[name]["small"], groups[name]["large"]
            current, _, gained, freed = (a + b for a, b in zip(small, large, strict=True))
            groups[name]["all"] = [current, peak, gained, freed]
        return {
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "max_split_size": -1 if limit >= UNLIMITED_BYTES else limit,
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
            "num_oom_rejections": self.rejections,
            **groups,
            "oversize_allocations": self.oversize_allocations.as_list(),
            "oversize_segments": self.oversize_segments.as_list(),
        }


def _raise_to(
    peaks: Peaks, count: int, size: int, requested: int, waiting_count: int, waiting_bytes: int
) -> None:
    if count > peaks.count:
        peaks.count = count
    if size > peaks.bytes:
        peaks.bytes = size
    if requested > peaks.requested:
        peaks.requested = requested
    if count + waiting_count > peaks.active_count:
        peaks.active_count = count + waiting_count
    if size + waiting_bytes > peaks.active_bytes:
        peaks.active_bytes = size + waiting_bytes


def _peaks_by_name(peaks: Peaks) -> dict[str, int]:
    return {
        "allocation": peaks.count,
        "segment": peaks.segments,
        "active": peaks.active_count,
        "inactive_split": peaks.split_count,
        "allocated_bytes": peaks.bytes,
        "reserved_bytes": peaks.reserved,
        "active_bytes": peaks.active_bytes,
        "inactive_split_bytes": peaks.split_bytes,
        "requested_bytes": peaks.requested,
    }


def _rows(counters: Counters, peaks: Peaks) -> dict[str, list[int]]:
    now = {
        "allocation": (counters.count, counters.count_total),
        "segment": (counters.segments, counters.segments_total),
        "active": (counters.count + counters.pending_count, counters.count_total),
        "inactive_split": (counters.split_count, counters.split_count_total),
        "allocated_bytes": (counters.bytes, counters.bytes_total),
        "reserved_bytes": (counters.reserved, counters.reserved_total),
        "active_bytes": (counters.bytes + counters.pending_bytes, counters.bytes_total),
        "inactive_split_bytes": (counters.split_bytes, counters.split_bytes_total),
        "requested_bytes": (counters.requested, counters.requested_total),
    }
    top = _peaks_by_name(peaks)
    return {name: [current, top[name], total, total - current] for name, (current, total) in now.items()}
