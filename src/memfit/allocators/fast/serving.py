"""Requests and frees, as `memfit.allocators.caching` serves them."""

from __future__ import annotations

from memfit.allocators.fast import books, paging, pieces, taking, trees
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Arrays, Ints
from memfit.allocators.fast.jit import compiled
from memfit.allocators.settings import (
    BLOCK_BYTES,
    LARGE_SEGMENT_LIMIT_BYTES,
    ROUNDUP_INTERVALS,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED_BYTES,
)


@compiled
def rounded(numbers: Ints, requested: int) -> int:
    """`memfit.allocators.settings.round_size`."""
    if numbers[f.PLAIN_ROUNDING] or requested < BLOCK_BYTES:
        return (requested + 511) & -512
    bits = 0
    while requested >> bits:
        bits += 1
    divisions = numbers[f.ROUNDUP + min(max(bits - 21, 0), ROUNDUP_INTERVALS - 1)]
    if divisions > 1 and requested > BLOCK_BYTES * divisions:
        step = (1 << (bits - 1)) // divisions
        return int(-(-requested // step) * step)
    return (requested + 511) & -512


@compiled
def malloc(a: Arrays, lane: int, requested: int) -> int:
    """A chunk for ``requested`` > 0 bytes, or NONE."""
    chunks, numbers = a.chunks, a.numbers
    if numbers[f.DONE_COUNT]:
        process_events(a)
    size = rounded(numbers, requested)
    small = size <= SMALL_LIMIT_BYTES
    home = 2 * lane + 1 if small else 2 * lane
    shift = 16 if small else 0
    if numbers[f.COLLECTS]:
        chunks[chunks[home, f.SEARCH_HOME], f.SEARCHES] += 1
    chunk = _cached(a, home, size)
    if chunk == NONE:
        chunk = _grow(a, home, size)
        if chunk == NONE:
            return NONE
    rest = chunks[chunk, f.SIZE] - size
    plain = chunks[chunk, f.PAGED] == 0
    split = chunks[chunk, f.PREV] != NONE or chunks[chunk, f.NEXT] != NONE
    divisible = small or numbers[f.EXPANDABLE] or (size < numbers[f.MAX_SPLIT] and rest > SMALL_LIMIT_BYTES)
    if rest >= BLOCK_BYTES and divisible:
        chunk = pieces.cut(a, chunk, size)
        if plain and split:
            numbers[shift + f.SPLIT_BYTES] -= size
        elif plain:
            numbers[shift + f.SPLIT_BYTES] += rest
            numbers[shift + f.SPLIT_BYTES_TOTAL] += rest
            numbers[shift + f.SPLIT_COUNT] += 1
            numbers[shift + f.SPLIT_COUNT_TOTAL] += 1
            books.note_split(numbers, shift)
    elif split and plain:
        numbers[shift + f.SPLIT_BYTES] -= chunks[chunk, f.SIZE]
        numbers[shift + f.SPLIT_COUNT] -= 1
    size = chunks[chunk, f.SIZE]
    chunks[chunk, f.STATE] = f.ALLOCATED
    chunks[chunk, f.REQUESTED] = requested
    numbers[shift + f.COUNT] += 1
    numbers[shift + f.COUNT_TOTAL] += 1
    numbers[shift + f.BYTES] += size
    numbers[shift + f.BYTES_TOTAL] += size
    numbers[shift + f.ASKED] += requested
    numbers[shift + f.ASKED_TOTAL] += requested
    numbers[f.RISING] = 1
    if size >= numbers[f.MAX_SPLIT]:
        books.count_oversize(numbers, f.OVERSIZE_ALLOCATIONS, 1)
    return int(chunk)


@compiled
def _cached(a: Arrays, home: int, size: int) -> int:
    """The cached chunk to take, out of its list; NONE where none may be taken."""
    chunk = trees.first_from(a.nodes, home, size)
    if chunk == NONE:
        return NONE
    if a.numbers[f.EXPANDABLE]:
        chunk = paging.best_fit(a, home, chunk)
    found, limit = a.chunks[chunk, f.SIZE], a.numbers[f.MAX_SPLIT]
    if size < limit <= found:
        return NONE
    if size >= limit and found >= size + a.numbers[f.NON_SPLIT_ROUNDING]:
        return NONE
    pieces.remove_free(a, chunk)
    return int(chunk)


@compiled
def free(a: Arrays, chunk: int) -> None:
    """Take a chunk back; it waits for its other streams, if it has any."""
    chunks, numbers = a.chunks, a.numbers
    if numbers[f.RISING]:
        books.note_peaks(numbers)
    size, shift = chunks[chunk, f.SIZE], (chunks[chunk, f.HOME] & 1) * 16
    numbers[shift + f.COUNT] -= 1
    numbers[shift + f.BYTES] -= size
    if size >= numbers[f.MAX_SPLIT]:
        books.count_oversize(numbers, f.OVERSIZE_ALLOCATIONS, -1)
    if chunks[chunk, f.USE] == f.NO_USE:
        pieces.release(a, chunk)
        return
    chunks[chunk, f.STATE] = f.PENDING
    numbers[shift + f.WAITING] += 1
    numbers[shift + f.WAITING_BYTES] += size
    chunks[chunk, f.LINK] = NONE
    if numbers[f.WAITING_COUNT] == 0:
        numbers[f.WAITING_FIRST] = chunk
    else:
        chunks[numbers[f.WAITING_LAST], f.LINK] = chunk
    numbers[f.WAITING_LAST] = chunk
    numbers[f.WAITING_COUNT] += 1
    if numbers[f.INSTANT]:
        numbers[f.DONE_COUNT] = numbers[f.WAITING_COUNT]


@compiled
def use(a: Arrays, chunk: int, stream: int) -> None:
    """`record_stream`. Of all the streams that use a chunk only the highest rank matters later."""
    if stream == a.chunks[a.chunks[chunk, f.HOME], f.STREAM]:
        return
    rank = -stream if stream else -(1 << 62)
    a.chunks[chunk, f.USE] = max(a.chunks[chunk, f.USE], rank)


@compiled
def process_events(a: Arrays) -> None:
    """Release the chunks whose other streams are done: by rank, in order of their frees."""
    chunks, numbers = a.chunks, a.numbers
    count = numbers[f.DONE_COUNT]
    numbers[f.WAITING_COUNT] -= count
    numbers[f.DONE_COUNT] = 0
    while count:
        chunk, rank = numbers[f.WAITING_FIRST], chunks[numbers[f.WAITING_FIRST], f.USE]
        for _ in range(count):
            rank = min(rank, chunks[chunk, f.USE])
            chunk = chunks[chunk, f.LINK]
        count -= _release_rank(a, rank, count, NONE)


@compiled
def _wait_for(a: Arrays, pool: int) -> None:
    """Release the chunks of a private pool; what was freed before the last of them is done then, too."""
    chunks, numbers = a.chunks, a.numbers
    first_time = True
    while True:
        found, rank, chunk = False, 0, numbers[f.WAITING_FIRST]
        for place in range(numbers[f.WAITING_COUNT]):
            if chunks[chunks[chunk, f.HOME], f.PRIVATE] == pool:
                rank = min(rank, chunks[chunk, f.USE]) if found else chunks[chunk, f.USE]
                found = True
                if first_time:
                    numbers[f.DONE_COUNT] = max(numbers[f.DONE_COUNT], place + 1)
            chunk = chunks[chunk, f.LINK]
        if not found:
            return
        first_time = False
        numbers[f.WAITING_COUNT] -= _release_rank(a, rank, numbers[f.WAITING_COUNT], pool)


@compiled
def _release_rank(a: Arrays, rank: int, count: int, pool: int) -> int:
    """Release those of one rank (and of a private pool, unless NONE) among the first ``count`` that wait;
    how many there were."""
    chunks, numbers = a.chunks, a.numbers
    released, before, chunk = 0, NONE, numbers[f.WAITING_FIRST]
    done = numbers[f.DONE_COUNT]
    for place in range(count):
        after = chunks[chunk, f.LINK]
        other_pool = pool not in (NONE, chunks[chunks[chunk, f.HOME], f.PRIVATE])
        if chunks[chunk, f.USE] != rank or other_pool:
            before, chunk = chunk, after
            continue
        if before == NONE:
            numbers[f.WAITING_FIRST] = after
        else:
            chunks[before, f.LINK] = after
        if after == NONE:
            numbers[f.WAITING_LAST] = before
        if place < done:
            numbers[f.DONE_COUNT] -= 1
        if numbers[f.RISING]:
            books.note_peaks(numbers)
        shift = (chunks[chunk, f.HOME] & 1) * 16
        chunks[chunk, f.USE] = f.NO_USE
        numbers[shift + f.WAITING] -= 1
        numbers[shift + f.WAITING_BYTES] -= chunks[chunk, f.SIZE]
        pieces.release(a, chunk)
        released += 1
        chunk = after
    return released


@compiled
def empty_cache(a: Arrays) -> None:
    """Give every cached segment, and every whole free page of expandable ones, back to the device."""
    a.numbers[f.SYNCS] += 1
    if a.numbers[f.WAITING_COUNT]:
        a.numbers[f.DONE_COUNT] = a.numbers[f.WAITING_COUNT]
        process_events(a)
    for home in range(a.numbers[f.HOMES]):
        if a.chunks[home, f.PRIVATE] == 0 or a.chunks[home, f.RELEASED]:
            _empty_home(a, home)


@compiled
def release_pool(a: Arrays, pool: int) -> None:
    """A private pool's owner lets it go."""
    a.numbers[f.SYNCS] += 1
    _wait_for(a, pool)
    unmapped = False
    for home in range(a.numbers[f.HOMES]):
        if a.chunks[home, f.PRIVATE] == pool:
            a.chunks[home, f.RELEASED] = 1
            if _empty_home(a, home):
                unmapped = True
    if unmapped:
        a.numbers[f.DONE_COUNT] = a.numbers[f.WAITING_COUNT]


@compiled
def _empty_home(a: Arrays, home: int) -> bool:
    """Give back what a home has cached; whether a page was unmapped."""
    unmapped = False
    chunk = trees.first_from(a.nodes, home, 0)
    while chunk != NONE:
        after = trees.following(a.nodes, home, chunk)
        if a.chunks[chunk, f.PAGED]:
            if paging.unmap(a, chunk):  # what stays of it as free is met again, and holds no page
                unmapped = True
        elif pieces.is_whole(a, chunk):
            taking.give_back(a, chunk)
        chunk = after
    return unmapped


@compiled
def _grow(a: Arrays, home: int, size: int) -> int:
    """No cached chunk serves: collect, ask the device, give back what is cached, ask again."""
    numbers = a.numbers
    if numbers[f.COLLECTS]:
        _collect_garbage(a)
    rejections = numbers[f.REJECTIONS]
    chunk = _ask_device(a, home, size)
    if chunk != NONE or numbers[f.REJECTIONS] > rejections:
        return int(chunk)
    if _give_back_oversize(a, home, size):
        chunk = _ask_device(a, home, size)
        if chunk != NONE or numbers[f.REJECTIONS] > rejections:
            return int(chunk)
    empty_cache(a)
    numbers[f.RETRIES] += 1
    chunk = _ask_device(a, home, size)
    if chunk == NONE and numbers[f.REJECTIONS] == rejections:
        numbers[f.OOMS] += 1
    return int(chunk)


@compiled
def _ask_device(a: Arrays, home: int, size: int) -> int:
    """A new segment, or memory mapped into an expandable one; NONE where there is none."""
    numbers = a.numbers
    wanted = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    if size < LARGE_SEGMENT_LIMIT_BYTES:
        wanted = SMALL_SEGMENT_BYTES if size <= SMALL_LIMIT_BYTES else numbers[f.LARGE_SEGMENT]
    if numbers[f.LIMIT] != NONE and numbers[f.RESERVED] + wanted > numbers[f.LIMIT]:
        return NONE
    if numbers[f.THROWS] and numbers[f.RESERVED] + wanted > numbers[f.REJECTION]:
        numbers[f.REJECTIONS] += 1
        return NONE
    if numbers[f.EXPANDABLE]:
        return int(paging.allocate(a, home, size))
    return int(taking.new_segment(a, home, wanted))


@compiled
def _give_back_oversize(a: Arrays, home: int, size: int) -> bool:
    """With max_split_size: free one cached block that is large enough, or several large ones."""
    limit = a.numbers[f.MAX_SPLIT]
    if limit >= UNLIMITED_BYTES:
        return False
    wanted = max(size, limit)
    chunk = trees.first_from(a.nodes, home, wanted)
    if chunk != NONE:
        if a.chunks[chunk, f.PAGED]:
            return False
        taking.give_back(a, chunk)
        return True
    freed = 0
    chunk = trees.last(a.nodes, home)
    while chunk != NONE and freed < wanted and a.chunks[chunk, f.SIZE] >= limit:
        before = trees.last_below(a.nodes, home, chunk)
        if not a.chunks[chunk, f.PAGED]:
            freed += a.chunks[chunk, f.SIZE]
            taking.give_back(a, chunk)
        chunk = before
    return bool(freed >= wanted)


@compiled
def _collect_garbage(a: Arrays) -> None:
    """Free old cached segments once more than the threshold is reserved, oldest half first."""
    target = a.numbers[f.RESERVED] - a.numbers[f.COLLECT_ABOVE]
    if target <= 0:
        return
    reclaimed = 0
    while reclaimed < target:
        count, ages = 0, 0
        for home in range(0, a.numbers[f.HOMES], 2):
            chunk = _next_garbage(a, home, NONE, 0.0)
            while chunk != NONE:
                count += 1
                ages += _age(a, chunk)
                chunk = _next_garbage(a, home, chunk, 0.0)
        if count == 0:
            break
        for home in range(0, a.numbers[f.HOMES], 2):
            chunk = _next_garbage(a, home, NONE, ages / count)
            while chunk != NONE:
                after = _next_garbage(a, home, chunk, ages / count)
                reclaimed += a.chunks[chunk, f.SIZE]
                taking.give_back(a, chunk)
                chunk = after


@compiled
def _age(a: Arrays, chunk: int) -> int:
    """How often its pool was searched since a chunk became free."""
    chunks = a.chunks
    return int(chunks[chunks[chunks[chunk, f.HOME], f.SEARCH_HOME], f.SEARCHES] - chunks[chunk, f.BORN])


@compiled
def _next_garbage(a: Arrays, home: int, chunk: int, least_age: float) -> int:
    """The cached segment of at least that age that comes after a chunk (NONE: the first), or NONE."""
    if a.chunks[home, f.PRIVATE]:
        return NONE
    nodes = a.nodes
    chunk = trees.first_from(nodes, home, 0) if chunk == NONE else trees.following(nodes, home, chunk)
    while chunk != NONE and not (pieces.is_whole(a, chunk) and _age(a, chunk) >= least_age):
        chunk = trees.following(nodes, home, chunk)
    return int(chunk)
