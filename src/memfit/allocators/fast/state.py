"""The state of a `CachingAllocator` as arrays, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memfit.allocators.caching import CachingAllocator
from memfit.allocators.chunks import Chunk, FreeList, Region
from memfit.allocators.fast import fields as f
from memfit.allocators.fast import pieces, trees
from memfit.allocators.fast.fields import NONE, Arrays, Ints
from memfit.allocators.statistics import Peaks

Lane = tuple[int, int]
"""A stream and a private pool, 0 for none."""

_GAUGES = ((f.OVERSIZE_ALLOCATIONS, "oversize_allocations"), (f.OVERSIZE_SEGMENTS, "oversize_segments"))
_PLAIN = (
    (f.RETRIES, "retries"), (f.OOMS, "ooms"), (f.REJECTIONS, "rejections"), (f.SYNCS, "syncs"),
    (f.DEVICE_ALLOCS, "device_allocs"), (f.DEVICE_FREES, "device_frees"),
)  # fmt: skip
_DEVICE = ((f.USED, "used_bytes"), (f.PEAK_USED, "peak_used_bytes"), (f.TOP, "_top"), (f.RANGES, "_ranges"))
_FIRST_ROWS = 1 << 10


def load(allocator: CachingAllocator, lanes: Sequence[Lane], *, known: Iterable[int] = ()) -> Arrays:
    """The state of an allocator as arrays.

    Args:
        lanes: every stream (in every private pool) that there is or will be.
        known: addresses of segments that lie where they lay in the run.
    """
    recorded, sure = allocator.device.recorded_segments(), np.unique(np.array(list(known), dtype=np.int64))
    numbers = np.zeros(f.NUMBERS + recorded.size + len(sure), dtype=np.int64)
    numbers[f.NUMBERS :] = np.concatenate([recorded.ravel(), sure])
    numbers[f.RECORDED_COUNT], numbers[f.KNOWN_COUNT] = len(recorded), len(sure)
    _rules(allocator, numbers)
    _counts(allocator, numbers)
    homes = numbers[f.HOMES] = 2 * len(lanes)
    rows = _FIRST_ROWS + 2 * homes + 4 * sum(1 for _ in allocator.chunks())
    arrays = Arrays(
        chunks=np.zeros((rows, f.CHUNK_FIELDS), dtype=np.int64),
        nodes=np.full((rows, f.NODE_FIELDS), NONE, dtype=np.int64),
        regions=np.zeros((_FIRST_ROWS + 2 * allocator.device._ranges, f.REGION_FIELDS), dtype=np.int64),
        numbers=numbers,
    )
    _spare(arrays, 2 * homes, rows)
    _set_homes(allocator, arrays, lanes)
    for region in allocator.regions.values():
        _load_region(arrays, region, lanes, sure)
    _load_waiting(allocator, arrays)
    return arrays


def _rules(allocator: CachingAllocator, numbers: Ints) -> None:
    settings = allocator.settings
    limit = allocator.limit_bytes
    numbers[f.TOTAL] = allocator.config.total_bytes
    numbers[f.LIMIT] = NONE if limit is None else limit
    numbers[f.REJECTION] = allocator._rejection_bytes
    numbers[f.THROWS] = settings.throw_on_cudamalloc_oom
    numbers[f.COLLECTS] = allocator._collects
    numbers[f.COLLECT_ABOVE] = int(settings.garbage_collection_threshold * (limit or 0))
    numbers[f.MAX_SPLIT] = settings.max_split_size_bytes
    numbers[f.EXPANDABLE] = settings.expandable_segments
    numbers[f.NON_SPLIT_ROUNDING] = settings.non_split_rounding_bytes
    numbers[f.LARGE_SEGMENT] = settings.large_segment_bytes
    numbers[f.PLAIN_ROUNDING] = allocator._plain_rounding
    numbers[f.BY_CREATION] = allocator.config.tie_break == "creation"
    numbers[f.INSTANT] = allocator.config.events == "instant"
    numbers[f.ROUNDUP : f.ROUNDUP + 16] = settings.roundup_power2_divisions


def _counts(allocator: CachingAllocator, numbers: Ints) -> None:
    book, device = allocator.stats_book, allocator.device
    for base, counters in ((f.LARGE, allocator.large), (f.SMALL, allocator.small)):
        for place, name in enumerate(f.COUNTER_NAMES):
            numbers[base + place] = getattr(counters, name)
    for base, peaks in _scopes(allocator):
        for place, name in enumerate(f.PEAK_NAMES):
            numbers[base + place] = getattr(peaks, name)
    for base, name in _GAUGES:
        gauge = getattr(book, name)
        numbers[base : base + 4] = gauge.as_list()
    for place, name in _PLAIN:
        numbers[place] = getattr(book, name)
    for place, name in _DEVICE:
        numbers[place] = getattr(device, name)
    numbers[f.RESERVED] = numbers[f.LAST_RESERVED] = allocator.reserved_bytes
    numbers[f.RISING] = allocator.rising
    for place in (f.WAITING_FIRST, f.WAITING_LAST, f.REGION_FIRST, f.REGION_LAST, f.SPARE):
        numbers[place] = NONE


def _scopes(allocator: CachingAllocator) -> tuple[tuple[int, Peaks], ...]:
    book = allocator.stats_book
    return ((f.PEAKS_LARGE, book._large), (f.PEAKS_SMALL, book._small), (f.PEAKS_ALL, book._all))


def _spare(arrays: Arrays, first: int, end: int) -> None:
    """Make rows from ``first`` on available, the lowest first."""
    if end <= first:
        return
    chunks, numbers = arrays.chunks, arrays.numbers
    chunks[first : end - 1, f.NEXT] = np.arange(first + 1, end)
    chunks[end - 1, f.NEXT] = numbers[f.SPARE]
    numbers[f.SPARE] = first
    numbers[f.SPARE_COUNT] += end - first


def _set_homes(allocator: CachingAllocator, arrays: Arrays, lanes: Sequence[Lane]) -> None:
    first_of: dict[tuple[int, int], int] = {}
    for lane, (stream, pool) in enumerate(lanes):
        for small in (0, 1):
            home = 2 * lane + small
            first = first_of.setdefault((pool, small), home)
            shared = allocator.share(small=bool(small), pool=pool)
            arrays.chunks[home, :5] = (stream, pool, shared.searches, first, shared.released)


def _load_region(arrays: Arrays, region: Region, lanes: Sequence[Lane], sure: Ints) -> None:
    chunks, regions, numbers = arrays.chunks, arrays.regions, arrays.numbers
    ordinal = region.ordinal
    last = int(numbers[f.REGION_LAST])
    known = region.address in sure
    base = region.address if known else f.NO_BASE
    regions[ordinal, :] = (region.address, region.size, region.page_bytes, NONE, NONE, last, base)
    if last == NONE:
        numbers[f.REGION_FIRST] = ordinal
    else:
        regions[last, f.NEXT_REGION] = ordinal
    numbers[f.REGION_LAST] = ordinal
    before, chunk = NONE, region.first
    while chunk is not None:
        home = 2 * lanes.index((chunk.home.stream, chunk.home.shared.pool)) + chunk.home.small
        row = pieces.new_chunk(arrays, ordinal, home, chunk.offset, chunk.size, chunk.order)
        pieces.link(arrays, row, before, NONE)
        chunks[row, f.STATE] = chunk.state
        chunks[row, f.REQUESTED] = chunk.requested
        if chunk.streams:
            chunks[row, f.USE] = max(use_rank(stream) for stream in chunk.streams)
        if chunk.state == f.FREE:
            pieces.insert_free(arrays, row)
            chunks[row, f.BORN] = chunk.born
        elif chunk.state == f.UNMAPPED:
            header = home + int(numbers[f.HOMES])
            trees.insert(arrays.nodes, header, row, 0, region.address + chunk.offset)
        before, chunk = row, chunk.next  # type: ignore[assignment]


def use_rank(stream: int) -> int:
    """By which chunks are released whose streams are done: the default stream first, then the newest."""
    return -stream if stream else -(1 << 62)


def _load_waiting(allocator: CachingAllocator, arrays: Arrays) -> None:
    numbers, chunks = arrays.numbers, arrays.chunks
    for chunk, done in allocator._pending:
        row = row_at(arrays, chunk.region.ordinal, chunk.offset)
        chunks[row, f.LINK] = NONE
        if numbers[f.WAITING_COUNT]:
            chunks[numbers[f.WAITING_LAST], f.LINK] = row
        else:
            numbers[f.WAITING_FIRST] = row
        numbers[f.WAITING_LAST] = row
        numbers[f.WAITING_COUNT] += 1
        numbers[f.DONE_COUNT] += done


def row_at(arrays: Arrays, region: int, offset: int) -> int:
    """The row of the chunk that begins there."""
    row = int(arrays.regions[region, f.FIRST])
    while arrays.chunks[row, f.OFFSET] != offset:
        row = int(arrays.chunks[row, f.NEXT])
    return row


def with_room(arrays: Arrays) -> Arrays:
    """The same with larger tables, where they are nearly full."""
    chunks, regions, numbers = arrays.chunks, arrays.regions, arrays.numbers
    if numbers[f.SPARE_COUNT] < len(chunks) // 2:
        first = len(chunks)
        chunks = np.concatenate([chunks, np.zeros_like(chunks)])
        nodes = np.concatenate([arrays.nodes, np.full_like(arrays.nodes, NONE)])
        arrays = arrays._replace(chunks=chunks, nodes=nodes)
        _spare(arrays, first, len(chunks))
    if numbers[f.RANGES] * 2 > len(regions):
        arrays = arrays._replace(regions=np.concatenate([regions, np.zeros_like(regions)]))
    return arrays


def store(arrays: Arrays, allocator: CachingAllocator) -> dict[int, Chunk]:
    """Put an allocator into the state that the arrays have; its chunks by row."""
    numbers = arrays.numbers.tolist()
    book = allocator.stats_book
    for base, counters in ((f.LARGE, allocator.large), (f.SMALL, allocator.small)):
        for place, name in enumerate(f.COUNTER_NAMES):
            setattr(counters, name, numbers[base + place])
    for base, peaks in _scopes(allocator):
        for place, name in enumerate(f.PEAK_NAMES):
            setattr(peaks, name, numbers[base + place])
    for base, name in _GAUGES:
        gauge = getattr(book, name)
        gauge.current, gauge.peak, gauge.gained, gauge.freed = numbers[base : base + 4]
    for place, name in _PLAIN:
        setattr(book, name, numbers[place])
    for place, name in _DEVICE:
        setattr(allocator.device, name, numbers[place])
    allocator.reserved_bytes = numbers[f.RESERVED]
    allocator.rising = bool(numbers[f.RISING])
    return _store_chunks(arrays, allocator)


def _store_chunks(arrays: Arrays, allocator: CachingAllocator) -> dict[int, Chunk]:
    homes = [_store_home(allocator, arrays, home) for home in range(int(arrays.numbers[f.HOMES]))]
    allocator.regions.clear()
    made: dict[int, Chunk] = {}
    ordinal = int(arrays.numbers[f.REGION_FIRST])
    while ordinal != NONE:
        address, size, page, row, following, *_ = arrays.regions[ordinal].tolist()
        region = Region(ordinal=ordinal, address=address, size=size, page_bytes=page)
        allocator.regions[ordinal] = region
        before: Chunk | None = None
        while row != NONE:
            values = arrays.chunks[row].tolist()
            before = made[row] = _stored(values, region, homes[values[f.HOME]], before)
            row = values[f.NEXT]
        ordinal = following
    _store_waiting(arrays, allocator, made)
    return made


def _store_home(allocator: CachingAllocator, arrays: Arrays, home: int) -> FreeList:
    stream, pool, searches, first, released = arrays.chunks[home, :5].tolist()
    made = allocator.home(stream, small=bool(home & 1), pool=pool)
    made.clear()
    made.shared.released = bool(released)
    if first == home:
        made.shared.searches = searches
    return made


def _stored(values: list[int], region: Region, home: FreeList, before: Chunk | None) -> Chunk:
    chunk = Chunk(region, home, values[f.OFFSET], values[f.SIZE], values[f.ORDER])
    chunk.state, chunk.requested = values[f.STATE], values[f.REQUESTED]
    chunk.prev = before
    if before is None:
        region.first = chunk
    else:
        before.next = chunk
    if values[f.USE] != f.NO_USE:
        chunk.streams = {-values[f.USE] if values[f.USE] > -(1 << 62) else 0}
    if chunk.state == f.FREE:
        home.insert(chunk)
        chunk.born = values[f.BORN]
    elif chunk.state == f.UNMAPPED:
        home.insert_unmapped(chunk)
    return chunk


def _store_waiting(arrays: Arrays, allocator: CachingAllocator, made: dict[int, Chunk]) -> None:
    numbers = arrays.numbers
    allocator._pending = []
    row = int(numbers[f.WAITING_FIRST])
    for place in range(int(numbers[f.WAITING_COUNT])):
        allocator._pending.append((made[row], place < numbers[f.DONE_COUNT]))
        row = int(arrays.chunks[row, f.LINK])
