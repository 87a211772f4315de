"""A caching allocator in a state that was recorded: the segments, the blocks in use, the free ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from memfit.allocators import reclaiming
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.chunks import (
    ALLOCATED,
    CREATION_SHIFT,
    DEVICE_ALIGNMENT_BYTES,
    FREE,
    UNMAPPED,
    Chunk,
    Device,
    FreeList,
    Region,
)
from memfit.allocators.settings import SMALL_SEGMENT_BYTES
from memfit.core.errors import UsageError
from memfit.core.snapshot import Segment, Snapshot


class RecordedDevice(Device):
    """A device that gives new segments the addresses that were recorded, for each size in order.

    Where free blocks of one size are told apart by address (torch before 2.14), this decides.
    """

    def __init__(self, total_bytes: int, segments: Iterable[tuple[int, int]]) -> None:
        super().__init__(total_bytes)
        self._recorded: dict[int, deque[int]] = {}
        for size, address in segments:
            self._recorded.setdefault(size, deque()).append(address)

    def recorded_segments(self) -> npt.NDArray[np.int64]:
        """The segments to come: rows of size, address and 0, by size and in order."""
        rows = [(size, address, 0) for size in sorted(self._recorded) for address in self._recorded[size]]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def new_region(self, size: int, *, page_bytes: int = 0) -> Region:
        """A range of addresses: the next recorded one of this size, or else above all others."""
        region = super().new_region(size, page_bytes=page_bytes)
        recorded = self._recorded.get(size)
        if recorded and not page_bytes:
            region.address = recorded.popleft()
        return region


def restore(
    allocator: CachingAllocator,
    snapshot: Snapshot,
    private_streams: Mapping[int, tuple[int, int]] | None = None,
) -> dict[int, Chunk]:
    """Put a fresh allocator in the state of a snapshot; its blocks in use come back by address.

    ``private_streams`` are those of the `memfit.core.recording.Recording`.

    A snapshot does not tell which segment was made first: they count as made in order of address. Counters of
    what was allocated and freed before are those of the blocks in use; peaks start here.

    Raises:
        UsageError: the device is smaller than what the snapshot holds, or the allocator was used before.
    """
    if allocator.regions:
        raise UsageError("restore() needs an allocator that has not been used")
    if not allocator.device.take(snapshot.reserved_bytes):
        raise UsageError(
            f"the state to start from holds {snapshot.reserved_bytes} bytes, and the device has"
            f" {allocator.device.total_bytes}; give at least that much"
        )
    in_use: dict[int, Chunk] = {}
    ranges: dict[tuple[int, str], Region] = {}
    for segment in snapshot.segments:
        stream, pool = (private_streams or {}).get(segment.stream, (segment.stream, 0))
        home = allocator.home(stream, small=segment.pool == "small", pool=pool)
        if segment.expandable:
            chunks = _mapped(allocator, home, segment, ranges)
        else:
            chunks = _chain(_region(allocator, segment.address, segment.size_bytes), home, segment)
            home.counters.segments += 1
            home.counters.segments_total += 1
        _count(allocator, home, segment, chunks)
        in_use |= {chunk.address: chunk for chunk in chunks if chunk.state == ALLOCATED}
    top = max((region.address + region.size for region in allocator.regions.values()), default=0)
    allocator.device._top = max(
        allocator.device._top, -(-top // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES
    )
    allocator.stats_book.reset_peaks()
    return in_use


def give_back_segment(allocator: CachingAllocator, region: Region) -> None:
    """Give one segment back to the device, if nothing in it is in use."""
    chunk = region.first
    if chunk.state == FREE and chunk.next is None and not region.page_bytes:
        reclaiming.give_back(allocator, chunk)


def _region(allocator: CachingAllocator, address: int, size: int, *, page_bytes: int = 0) -> Region:
    device = allocator.device
    region = Region(ordinal=device._ranges, address=address, size=size, page_bytes=page_bytes)
    device._ranges += 1
    allocator.regions[region.ordinal] = region
    return region


def _order(allocator: CachingAllocator, region: Region, offset: int) -> int:
    by_creation = allocator.config.tie_break == "creation"
    first = region.ordinal << CREATION_SHIFT if by_creation else region.address >> 9
    return first + (offset >> 9)


def _chain(region: Region, home: FreeList, segment: Segment, *, after: Chunk | None = None) -> list[Chunk]:
    """The blocks of a segment as chunks linked to each other (and to what lies before)."""
    chunks = []
    for block in segment.blocks:
        chunk = Chunk(region, home, block.address - region.address, block.size_bytes, 0)
        chunk.state = ALLOCATED if block.active else FREE
        chunk.requested = block.requested_bytes
        _link(chunk, after)
        chunks.append(chunk)
        after = chunk
    return chunks


def _link(chunk: Chunk, before: Chunk | None) -> None:
    chunk.prev = before
    if before is None:
        chunk.region.first = chunk
    else:
        before.next = chunk


def _mapped(
    allocator: CachingAllocator, home: FreeList, segment: Segment, ranges: dict[tuple[int, str], Region]
) -> list[Chunk]:
    """A mapped stretch of the stream's and pool's range, with unmapped space before and behind it."""
    key = (segment.stream, segment.pool)
    region = ranges.get(key)
    if region is None or segment.address + segment.size_bytes > region.address + region.size:
        page = SMALL_SEGMENT_BYTES if home.small else allocator.settings.large_segment_bytes
        total = max(allocator.config.total_bytes, segment.size_bytes)
        space = -(-(total + total // 8) // page) * page
        region = ranges[key] = _region(allocator, segment.address, space, page_bytes=page)
        before = None
    else:
        before = _last(region)
        if before.state == UNMAPPED:  # the space behind the stretch before: it ends where this one begins
            home.remove_unmapped(before)
            before.size = segment.address - before.address
            if before.size:
                home.insert_unmapped(before)
            else:
                before = before.prev
    chunks = _chain(region, home, segment, after=before)
    end = segment.address + segment.size_bytes - region.address
    if end < region.size:
        rest = Chunk(region, home, end, region.size - end, _order(allocator, region, end))
        rest.state = UNMAPPED
        _link(rest, chunks[-1])
        home.insert_unmapped(rest)
    return chunks


def _last(region: Region) -> Chunk:
    chunk = region.first
    while chunk.next is not None:
        chunk = chunk.next
    return chunk


def _count(allocator: CachingAllocator, home: FreeList, segment: Segment, chunks: Iterable[Chunk]) -> None:
    """Account for the blocks of a segment, and put the free ones into their list."""
    counters = home.counters
    allocator.count_reserved(counters, segment.size_bytes)
    for chunk in chunks:
        chunk.order = _order(allocator, chunk.region, chunk.offset)
        if chunk.state == FREE:
            home.insert(chunk)
            if not chunk.region.page_bytes and (chunk.prev is not None or chunk.next is not None):
                counters.split_bytes += chunk.size
                counters.split_bytes_total += chunk.size
                counters.split_count += 1
                counters.split_count_total += 1
            continue
        counters.count += 1
        counters.count_total += 1
        counters.bytes += chunk.size
        counters.bytes_total += chunk.size
        counters.requested += chunk.requested
        counters.requested_total += chunk.requested
