"""Expandable segments, as `memfit.allocators.expandable` has them."""

from __future__ import annotations

from memfit.allocators.fast import books, pieces, taking, trees
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Arrays
from memfit.allocators.fast.jit import compiled
from memfit.allocators.settings import SMALL_SEGMENT_BYTES


@compiled
def _room(a: Arrays, chunk: int) -> int:
    room, after = a.chunks[chunk, f.SIZE], a.chunks[chunk, f.NEXT]
    if after != NONE and a.chunks[after, f.STATE] == f.UNMAPPED:
        room += a.chunks[after, f.SIZE]
    return int(room)


@compiled
def best_fit(a: Arrays, home: int, chunk: int) -> int:
    """From the smallest free chunk that fits, step on while the next one could grow to strictly less."""
    room = _room(a, chunk)
    while a.chunks[chunk, f.PAGED]:
        after = trees.following(a.nodes, home, chunk)
        if after == NONE:
            break
        its_room = _room(a, after)
        if its_room >= room:
            break
        chunk, room = after, its_room
    return chunk


@compiled
def _insert_unmapped(a: Arrays, chunk: int) -> None:
    address = a.regions[a.chunks[chunk, f.REGION], f.ADDRESS] + a.chunks[chunk, f.OFFSET]
    trees.insert(a.nodes, a.chunks[chunk, f.HOME] + a.numbers[f.HOMES], chunk, 0, address)


@compiled
def _remove_unmapped(a: Arrays, chunk: int) -> None:
    trees.remove(a.nodes, a.chunks[chunk, f.HOME] + a.numbers[f.HOMES], chunk)


@compiled
def _holds(a: Arrays, start: int, size: int) -> bool:
    found, chunk = 0, start
    while found < size and chunk != NONE:
        state = a.chunks[chunk, f.STATE]
        if state not in (f.FREE, f.UNMAPPED):
            break
        found += a.chunks[chunk, f.SIZE]
        chunk = a.chunks[chunk, f.NEXT]
    return bool(found >= size)


@compiled
def _candidate(a: Arrays, home: int, size: int) -> int:
    """The lowest place where free and unmapped neighbours hold ``size``; else the start of a new range."""
    header = home + a.numbers[f.HOMES]
    at = trees.first_from(a.nodes, header, 0)
    while at != NONE:
        before = a.chunks[at, f.PREV]
        start = before if before != NONE and a.chunks[before, f.STATE] == f.FREE else at
        if _holds(a, start, size):
            return int(start)
        at = trees.following(a.nodes, header, at)
    page = SMALL_SEGMENT_BYTES if home & 1 else a.numbers[f.LARGE_SEGMENT]
    total = a.numbers[f.TOTAL]
    space = -(-(total + total // 8) // page) * page
    chunk = a.regions[taking.new_region(a, home, space, page), f.FIRST]
    a.chunks[chunk, f.STATE] = f.UNMAPPED
    _insert_unmapped(a, chunk)
    return int(chunk)


@compiled
def _join(a: Arrays, chunk: int) -> None:
    """Take neighbours in the same state (free or unmapped) in."""
    chunks = a.chunks
    for field in (f.PREV, f.NEXT):
        other = chunks[chunk, field]
        if other == NONE or chunks[other, f.STATE] != chunks[chunk, f.STATE]:
            continue
        if chunks[chunk, f.STATE] == f.FREE:
            pieces.remove_free(a, other)
        else:
            _remove_unmapped(a, other)
        if field == f.PREV:
            chunks[chunk, f.OFFSET] = chunks[other, f.OFFSET]
            chunks[chunk, f.ORDER] = chunks[other, f.ORDER]
            pieces.link(a, chunk, chunks[other, f.PREV], chunks[chunk, f.NEXT])
        else:
            pieces.link(a, chunk, chunks[chunk, f.PREV], chunks[other, f.NEXT])
        chunks[chunk, f.SIZE] += chunks[other, f.SIZE]
        pieces.drop_chunk(a, other)


@compiled
def _map(a: Arrays, chunk: int, size: int) -> bool:
    """Put memory behind the first ``size`` bytes (in whole pages) of an unmapped chunk and make it free."""
    chunks = a.chunks
    region, home = chunks[chunk, f.REGION], chunks[chunk, f.HOME]
    page = chunks[chunk, f.PAGED]
    mapped = -(-size // page) * page
    if not taking.take(a, mapped):
        return False
    _remove_unmapped(a, chunk)
    rest_bytes = chunks[chunk, f.SIZE] - mapped
    if rest_bytes > 0:
        offset, order = chunks[chunk, f.OFFSET] + mapped, chunks[chunk, f.ORDER] + (mapped >> 9)
        rest = pieces.new_chunk(a, region, home, offset, rest_bytes, order)
        chunks[rest, f.STATE] = f.UNMAPPED
        pieces.link(a, rest, chunk, chunks[chunk, f.NEXT])
        _insert_unmapped(a, rest)
        chunks[chunk, f.SIZE] = mapped
    chunks[chunk, f.STATE] = f.FREE
    _join(a, chunk)
    pieces.insert_free(a, chunk)
    books.count_reserved(a.numbers, (home & 1) * 16, mapped)
    a.numbers[f.DEVICE_ALLOCS] += 1
    return True


@compiled
def allocate(a: Arrays, home: int, size: int) -> int:
    """A free chunk of ``size`` or more, mapped where need be, out of its free list; NONE: no memory."""
    chunks = a.chunks
    chunk = _candidate(a, home, size)
    if chunks[chunk, f.STATE] == f.UNMAPPED and not _map(a, chunk, min(chunks[chunk, f.SIZE], size)):
        return NONE
    while chunks[chunk, f.SIZE] < size:
        after = chunks[chunk, f.NEXT]
        if not _map(a, after, min(size - chunks[chunk, f.SIZE], chunks[after, f.SIZE])):
            return NONE
        chunk = after  # it took the free chunk before it in
    pieces.remove_free(a, chunk)
    return int(chunk)


@compiled
def _edge(a: Arrays, chunk: int, offset: int, size: int, order: int, before: int, after: int) -> None:
    edge = pieces.new_chunk(a, a.chunks[chunk, f.REGION], a.chunks[chunk, f.HOME], offset, size, order)
    pieces.link(a, edge, before, after)
    pieces.insert_free(a, edge)


@compiled
def unmap(a: Arrays, chunk: int) -> bool:
    """Give the whole pages in a free chunk back, if it has any; its edges stay free."""
    chunks = a.chunks
    region, home = chunks[chunk, f.REGION], chunks[chunk, f.HOME]
    page = chunks[chunk, f.PAGED]
    offset, order = chunks[chunk, f.OFFSET], chunks[chunk, f.ORDER]
    past = offset + chunks[chunk, f.SIZE]
    start, end = -(-offset // page) * page, past // page * page
    if end <= start:
        return False
    pieces.remove_free(a, chunk)
    if start > offset:
        _edge(a, chunk, offset, start - offset, order, chunks[chunk, f.PREV], chunk)
    if past > end:
        _edge(a, chunk, end, past - end, order + ((end - offset) >> 9), chunk, chunks[chunk, f.NEXT])
    chunks[chunk, f.ORDER] = order + ((start - offset) >> 9)
    chunks[chunk, f.OFFSET], chunks[chunk, f.SIZE] = start, end - start
    chunks[chunk, f.STATE] = f.UNMAPPED
    _join(a, chunk)
    _insert_unmapped(a, chunk)
    a.numbers[f.USED] -= end - start
    books.count_reserved(a.numbers, (home & 1) * 16, start - end)
    a.numbers[f.DEVICE_FREES] += 1
    if chunks[chunk, f.PREV] == NONE and chunks[chunk, f.NEXT] == NONE:
        _remove_unmapped(a, chunk)
        taking.drop_region(a, region)
        pieces.drop_chunk(a, chunk)
    return True
