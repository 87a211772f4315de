"""The loop over the events of a program."""

from __future__ import annotations

from typing import Any

from memfit.allocators.fast import books, pieces, serving, taking
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Arrays, Columns
from memfit.allocators.fast.jit import compiled
from memfit.core.trace import Action

ALLOC, FREE, OOM = int(Action.ALLOC), int(Action.FREE), int(Action.OOM)
RECORD, SYNC = int(Action.RECORD_STREAM), int(Action.SYNC)
RELEASE = int(Action.RELEASE_POOL)
EMPTY, RESET = int(Action.EMPTY_CACHE), int(Action.RESET_PEAK)
SEGMENT_FREE, SEGMENT_UNMAP = int(Action.SEGMENT_FREE), int(Action.SEGMENT_UNMAP)

MARGIN = 8
"""Rows of chunks that one event may need, beside two for each free chunk when pages are given back."""


@compiled
def _wide(number: Any) -> int:
    """A number of a narrow column as one of 64 bits, the only kind that functions here are compiled for."""
    return int(number + 0)


@compiled
def advance(a: Arrays, e: Columns, start: int, stop: int) -> tuple[int, int]:
    """Run the events from ``start`` to before ``stop``.

    Returns:
        What happened (`REACHED`, `NEEDS_ROOM` before an event, `FAILED` after one), and the next event.
    """
    numbers = a.numbers
    for index in range(start, stop):
        if _lacks_room(a, e):
            return f.NEEDS_ROOM, index
        action = e.action[index]
        failed = False
        if action == ALLOC:
            failed = not _allocate(a, e, index)
        elif action == FREE:
            slot = e.block[index] - numbers[f.LEAST_BLOCK]
            chunk = _wide(e.slots[slot])
            if chunk != NONE:
                e.slots[slot] = NONE
                serving.free(a, chunk)
        else:
            failed = not _other(a, e, index, action)
        if numbers[f.RESERVED] != numbers[f.LAST_RESERVED]:
            _note_change(a, e, index)
        if len(e.totals):
            e.totals[index, 0] = numbers[f.LARGE + f.ASKED] + numbers[f.SMALL + f.ASKED]
            e.totals[index, 1] = numbers[f.LARGE + f.BYTES] + numbers[f.SMALL + f.BYTES]
            e.totals[index, 2] = numbers[f.RESERVED]
        if failed:
            return f.FAILED, index + 1
    return f.REACHED, stop


@compiled
def _lacks_room(a: Arrays, e: Columns) -> bool:
    numbers = a.numbers
    if numbers[f.SPARE_COUNT] < MARGIN + 2 * numbers[f.FREE_COUNT]:
        return True
    return bool(numbers[f.RANGES] + 2 >= len(a.regions) or numbers[f.CHANGES] + 1 >= len(e.changes))


@compiled
def _note_change(a: Arrays, e: Columns, index: int) -> None:
    numbers = a.numbers
    change = numbers[f.CHANGES]
    e.changes[change, 0], e.changes[change, 1] = index, numbers[f.RESERVED]
    numbers[f.CHANGES] += 1
    numbers[f.LAST_RESERVED] = numbers[f.RESERVED]


@compiled
def _allocate(a: Arrays, e: Columns, index: int) -> bool:
    """One allocation: where it landed, and whether that is where it was recorded. False: out of memory."""
    numbers = a.numbers
    place = numbers[f.PLACEMENTS]
    numbers[f.PLACEMENTS] += 1
    chunk = NONE
    if e.size[index] > 0:
        numbers[f.RESERVED_BEFORE] = numbers[f.RESERVED]
        chunk = serving.malloc(a, _wide(e.lane[e.stream[index]]), e.size[index])
    if chunk == NONE:
        e.placements[place, 0], e.placements[place, 1] = -1, 0
        return bool(e.size[index] == 0)
    e.slots[e.block[index] - numbers[f.LEAST_BLOCK]] = chunk
    region, offset = a.chunks[chunk, f.REGION], a.chunks[chunk, f.OFFSET]
    e.placements[place, 0], e.placements[place, 1] = region, offset
    if len(e.address) and e.address[index] != 0:
        recorded = e.address[index]
        numbers[f.COMPARED] += 1
        if a.regions[region, f.BASE] == f.NO_BASE:
            a.regions[region, f.BASE] = recorded - offset
        if a.regions[region, f.BASE] + offset == recorded:
            numbers[f.SAME] += 1
    return True


@compiled
def _other(a: Arrays, e: Columns, index: int, action: int) -> bool:
    """Any other event. False: an allocation that failed in the run fails here, too."""
    numbers = a.numbers
    if action == RECORD:
        chunk = _wide(e.slots[e.block[index] - numbers[f.LEAST_BLOCK]])
        if chunk != NONE:
            serving.use(a, chunk, _wide(e.stream[index]))
    elif action == SYNC:
        numbers[f.DONE_COUNT] = numbers[f.WAITING_COUNT]
    elif action == EMPTY:
        serving.empty_cache(a)
    elif action == RESET:
        books.reset_peaks(numbers)
    elif action == RELEASE:
        serving.release_pool(a, a.chunks[2 * _wide(e.lane[e.stream[index]]), f.PRIVATE])
    elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
        _given_back(a, e, index, action)
    elif action == OOM and e.size[index] > 0:
        numbers[f.RESERVED_BEFORE] = numbers[f.RESERVED]
        chunk = serving.malloc(a, _wide(e.lane[e.stream[index]]), e.size[index])
        if chunk == NONE:
            return False
        if index <= numbers[f.KEPT_AFTER]:
            serving.free(a, chunk)
    return True


@compiled
def _given_back(a: Arrays, e: Columns, index: int, action: int) -> None:
    """In the recorded run the segment that went back; in others the whole cache, once for all that went."""
    if a.numbers[f.EXACT] and action == SEGMENT_FREE:
        region = taking.find_region(a, e.address[index], e.size[index])
        if region != NONE:
            chunk = a.regions[region, f.FIRST]
            if a.chunks[chunk, f.STATE] == f.FREE and pieces.is_whole(a, chunk):
                taking.give_back(a, chunk)
            return
    before = e.action[index - 1] if index else 0
    if before not in (SEGMENT_FREE, SEGMENT_UNMAP):
        serving.empty_cache(a)
