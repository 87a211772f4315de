"""Chunks: made, cut, joined, put into their free lists and taken out."""

from __future__ import annotations

from memfit.allocators.fast import books, trees
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Arrays
from memfit.allocators.fast.jit import compiled


@compiled
def new_chunk(a: Arrays, region: int, home: int, offset: int, size: int, order: int) -> int:
    """A row for a chunk; it is free, linked to nothing and in no list."""
    chunks, numbers = a.chunks, a.numbers
    chunk = numbers[f.SPARE]
    numbers[f.SPARE] = chunks[chunk, f.NEXT]
    numbers[f.SPARE_COUNT] -= 1
    chunks[chunk, f.SIZE] = size
    chunks[chunk, f.OFFSET] = offset
    chunks[chunk, f.ORDER] = order
    chunks[chunk, f.REGION] = region
    chunks[chunk, f.HOME] = home
    chunks[chunk, f.STATE] = f.FREE
    chunks[chunk, f.PREV] = NONE
    chunks[chunk, f.NEXT] = NONE
    chunks[chunk, f.REQUESTED] = 0
    chunks[chunk, f.BORN] = 0
    chunks[chunk, f.USE] = f.NO_USE
    chunks[chunk, f.PAGED] = a.regions[region, f.PAGE]
    return int(chunk)


@compiled
def drop_chunk(a: Arrays, chunk: int) -> None:
    """A row that is needed no more."""
    a.chunks[chunk, f.NEXT] = a.numbers[f.SPARE]
    a.numbers[f.SPARE] = chunk
    a.numbers[f.SPARE_COUNT] += 1


@compiled
def link(a: Arrays, chunk: int, before: int, after: int) -> None:
    """Put a chunk between its neighbours."""
    a.chunks[chunk, f.PREV] = before
    a.chunks[chunk, f.NEXT] = after
    if before == NONE:
        a.regions[a.chunks[chunk, f.REGION], f.FIRST] = chunk
    else:
        a.chunks[before, f.NEXT] = chunk
    if after != NONE:
        a.chunks[after, f.PREV] = chunk


@compiled
def insert_free(a: Arrays, chunk: int) -> None:
    """Put a free chunk into its list."""
    home = a.chunks[chunk, f.HOME]
    size, order = a.chunks[chunk, f.SIZE], a.chunks[chunk, f.ORDER]
    trees.insert(a.nodes, home, chunk, size, order)
    a.chunks[chunk, f.BORN] = a.chunks[a.chunks[home, f.SEARCH_HOME], f.SEARCHES]
    a.numbers[f.FREE_COUNT] += 1


@compiled
def remove_free(a: Arrays, chunk: int) -> None:
    """Take a free chunk out of its list."""
    trees.remove(a.nodes, a.chunks[chunk, f.HOME], chunk)
    a.numbers[f.FREE_COUNT] -= 1


@compiled
def is_whole(a: Arrays, chunk: int) -> bool:
    """Whether a chunk is all of its segment, and no expandable one's."""
    chunks = a.chunks
    alone = chunks[chunk, f.PREV] == NONE and chunks[chunk, f.NEXT] == NONE
    return bool(alone and chunks[chunk, f.PAGED] == 0)


@compiled
def cut(a: Arrays, chunk: int, size: int) -> int:
    """The first ``size`` bytes of a chunk as one of their own; the rest goes into the free list."""
    chunks = a.chunks
    order = chunks[chunk, f.ORDER]
    head = new_chunk(a, chunks[chunk, f.REGION], chunks[chunk, f.HOME], chunks[chunk, f.OFFSET], size, order)
    link(a, head, chunks[chunk, f.PREV], chunk)
    chunks[chunk, f.OFFSET] += size
    chunks[chunk, f.SIZE] -= size
    chunks[chunk, f.ORDER] = order + (size >> 9)
    insert_free(a, chunk)
    return head


@compiled
def release(a: Arrays, chunk: int) -> None:
    """Put a chunk that nobody uses into its free list, joined with its free neighbours."""
    chunks, numbers = a.chunks, a.numbers
    shift = (chunks[chunk, f.HOME] & 1) * 16
    numbers[shift + f.ASKED] -= chunks[chunk, f.REQUESTED]
    own, joined = chunks[chunk, f.SIZE], 0
    before, after = chunks[chunk, f.PREV], chunks[chunk, f.NEXT]
    if before != NONE and chunks[before, f.STATE] == f.FREE:
        remove_free(a, before)
        chunks[chunk, f.OFFSET] = chunks[before, f.OFFSET]
        chunks[chunk, f.ORDER] = chunks[before, f.ORDER]
        chunks[chunk, f.SIZE] += chunks[before, f.SIZE]
        link(a, chunk, chunks[before, f.PREV], after)
        drop_chunk(a, before)
        joined += 1
    if after != NONE and chunks[after, f.STATE] == f.FREE:
        remove_free(a, after)
        chunks[chunk, f.SIZE] += chunks[after, f.SIZE]
        link(a, chunk, chunks[chunk, f.PREV], chunks[after, f.NEXT])
        drop_chunk(a, after)
        joined += 1
    chunks[chunk, f.STATE] = f.FREE
    insert_free(a, chunk)
    if chunks[chunk, f.PAGED]:
        return
    if chunks[chunk, f.PREV] != NONE or chunks[chunk, f.NEXT] != NONE:
        numbers[shift + f.SPLIT_BYTES] += own
        numbers[shift + f.SPLIT_BYTES_TOTAL] += own
        numbers[shift + f.SPLIT_COUNT] += 1 - joined
        if joined == 0:
            numbers[shift + f.SPLIT_COUNT_TOTAL] += 1
        books.note_split(numbers, shift)
    else:
        numbers[shift + f.SPLIT_BYTES] -= chunks[chunk, f.SIZE] - own
        numbers[shift + f.SPLIT_COUNT] -= joined
