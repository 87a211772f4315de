"""The device: memory taken from it and given back, address ranges, segments that go."""

from __future__ import annotations

from memfit.allocators.chunks import CREATION_SHIFT, DEVICE_ALIGNMENT_BYTES
from memfit.allocators.fast import books, pieces
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Arrays, Ints
from memfit.allocators.fast.jit import compiled


@compiled
def take(a: Arrays, size: int) -> bool:
    """Take physical memory, if there is that much."""
    used = a.numbers[f.USED] + size
    if used > a.numbers[f.TOTAL]:
        return False
    a.numbers[f.USED] = used
    a.numbers[f.PEAK_USED] = max(a.numbers[f.PEAK_USED], used)
    return True


@compiled
def new_region(a: Arrays, home: int, size: int, page: int) -> int:
    """Address space for a segment, as one chunk that is in no list yet."""
    numbers, regions = a.numbers, a.regions
    ordinal = numbers[f.RANGES]
    numbers[f.RANGES] += 1
    address = numbers[f.TOP]
    numbers[f.TOP] += -(-size // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES
    if page == 0 and numbers[f.RECORDED_COUNT]:
        address = _recorded_address(numbers, size, address)
    regions[ordinal, f.ADDRESS] = address
    regions[ordinal, f.REGION_SIZE] = size
    regions[ordinal, f.PAGE] = page
    regions[ordinal, f.BASE] = address if _is_known(numbers, address) else f.NO_BASE
    order = ordinal << CREATION_SHIFT if numbers[f.BY_CREATION] else address >> 9
    regions[ordinal, f.FIRST] = pieces.new_chunk(a, ordinal, home, 0, size, order)
    last = numbers[f.REGION_LAST]
    regions[ordinal, f.PREVIOUS_REGION], regions[ordinal, f.NEXT_REGION] = last, NONE
    if last == NONE:
        numbers[f.REGION_FIRST] = ordinal
    else:
        regions[last, f.NEXT_REGION] = ordinal
    numbers[f.REGION_LAST] = ordinal
    return int(ordinal)


@compiled
def _first_not_below(numbers: Ints, begin: int, count: int, step: int, value: int) -> int:
    """Of ``count`` sorted numbers, ``step`` places apart, the first from ``value`` on, or ``count``."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if numbers[begin + middle * step] < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _recorded_address(numbers: Ints, size: int, otherwise: int) -> int:
    """The next recorded address for a segment of this size."""
    count = numbers[f.RECORDED_COUNT]
    row = _first_not_below(numbers, f.NUMBERS, count, 3, size)
    first = f.NUMBERS + 3 * row
    if row == count or numbers[first] != size:
        return otherwise
    row += numbers[first + 2]
    at = f.NUMBERS + 3 * row
    if row == count or numbers[at] != size:
        return otherwise
    numbers[first + 2] += 1
    return int(numbers[at + 1])


@compiled
def _is_known(numbers: Ints, address: int) -> bool:
    begin, count = f.NUMBERS + 3 * numbers[f.RECORDED_COUNT], numbers[f.KNOWN_COUNT]
    place = _first_not_below(numbers, begin, count, 1, address)
    return bool(place < count and numbers[begin + place] == address)


@compiled
def drop_region(a: Arrays, region: int) -> None:
    """A range that is no more."""
    regions = a.regions
    before, after = regions[region, f.PREVIOUS_REGION], regions[region, f.NEXT_REGION]
    if before == NONE:
        a.numbers[f.REGION_FIRST] = after
    else:
        regions[before, f.NEXT_REGION] = after
    if after == NONE:
        a.numbers[f.REGION_LAST] = before
    else:
        regions[after, f.PREVIOUS_REGION] = before


@compiled
def new_segment(a: Arrays, home: int, size: int) -> int:
    """A segment from the device as one chunk, or NONE."""
    numbers = a.numbers
    if not take(a, size):
        return NONE
    region = new_region(a, home, size, 0)
    shift = (home & 1) * 16
    books.count_segment(numbers, shift)
    books.count_reserved(numbers, shift, size)
    numbers[f.DEVICE_ALLOCS] += 1
    if size >= numbers[f.MAX_SPLIT]:
        books.count_oversize(numbers, f.OVERSIZE_SEGMENTS, 1)
    return int(a.regions[region, f.FIRST])


@compiled
def give_back(a: Arrays, chunk: int) -> None:
    """Free a whole cached segment."""
    numbers = a.numbers
    pieces.remove_free(a, chunk)
    size = a.chunks[chunk, f.SIZE]
    shift = (a.chunks[chunk, f.HOME] & 1) * 16
    numbers[f.USED] -= size
    numbers[shift + f.SEGMENTS] -= 1
    books.count_reserved(numbers, shift, -size)
    numbers[f.DEVICE_FREES] += 1
    if size >= numbers[f.MAX_SPLIT]:
        books.count_oversize(numbers, f.OVERSIZE_SEGMENTS, -1)
    drop_region(a, a.chunks[chunk, f.REGION])
    pieces.drop_chunk(a, chunk)


@compiled
def find_region(a: Arrays, address: int, size: int) -> int:
    """The oldest range that lies there and is that long, or NONE."""
    region = a.numbers[f.REGION_FIRST]
    while region != NONE:
        if a.regions[region, f.ADDRESS] == address and a.regions[region, f.REGION_SIZE] == size:
            break
        region = a.regions[region, f.NEXT_REGION]
    return int(region)
