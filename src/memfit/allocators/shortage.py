"""Why an allocation did not fit: what lay free, in which holes, and which blocks keep their segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.allocators.replay import SegmentLayout
from memfit.allocators.running import Failure, Layout
from memfit.allocators.settings import SMALL_LIMIT_BYTES
from memfit.core.trace import Action, Trace

FREE_STATE = "I"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A segment that cannot go back to the device because blocks in it are in use.

    Attributes:
        region, offset_bytes: which one, as in the placements.
        size_bytes, free_bytes: of the segment.
        stream, pool: whom it serves.
        block_count: blocks in use.
        blocks: the largest of them, as ``(size, where it was asked for, event, event that frees it)``; the
            last two are ``None`` for "before the recording" and "never".
    """

    region: int
    offset_bytes: int
    size_bytes: int
    free_bytes: int
    stream: int
    pool: str
    block_count: int
    blocks: tuple[tuple[int, str, int | None, int | None], ...]

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return self.size_bytes - self.free_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("size_bytes", "where", "allocated_at_event", "freed_at_event")
        return {
            "range": self.region,
            "offset_bytes": self.offset_bytes,
            "size_bytes": self.size_bytes,
            "free_bytes": self.free_bytes,
            "live_bytes": self.live_bytes,
            "stream": self.stream,
            "pool": self.pool,
            "block_count": self.block_count,
            "largest_blocks": [dict(zip(names, block, strict=True)) for block in self.blocks],
        }


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """One out of memory, explained.

    Attributes:
        failure: the numbers at that moment.
        free_bytes, hole_count: what lay free in segments, and in how many pieces.
        usable_free_bytes, largest_hole_bytes: of it, in segments that serve this request (same stream, same
            pool), and the largest piece there.
        whole_free_bytes: segments without a block in use.
        pinned: the segments that are kept, the most free bytes first.
    """

    failure: Failure
    free_bytes: int
    hole_count: int
    usable_free_bytes: int
    largest_hole_bytes: int
    whole_free_bytes: int
    pinned: tuple[Pinned, ...]

    @property
    def is_layout(self) -> bool:
        """Whether what is in use and the request together would fit: only the layout fails."""
        return self.failure.allocated_bytes + self.failure.requested_bytes <= self.failure.limit_bytes

    @property
    def missing_bytes(self) -> int:
        """By how much what is in use and the request exceed what there is; 0 where the layout is to blame."""
        needed = self.failure.allocated_bytes + self.failure.requested_bytes
        return max(needed - self.failure.limit_bytes, 0)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the sentences that explain them."""
        failure = self.failure
        return {
            "event": failure.event,
            "requested_bytes": failure.requested_bytes,
            "live_bytes": failure.live_bytes,
            "allocated_bytes": failure.allocated_bytes,
            "reserved_bytes": failure.reserved_bytes,
            "limit_bytes": failure.limit_bytes,
            "released_by_retry_bytes": failure.released_bytes,
            "free_in_segments_bytes": self.free_bytes,
            "hole_count": self.hole_count,
            "usable_free_bytes": self.usable_free_bytes,
            "largest_hole_bytes": self.largest_hole_bytes,
            "whole_free_segments_bytes": self.whole_free_bytes,
            "cause": "layout" if self.is_layout else "amount",
            "missing_bytes": self.missing_bytes,
            "pinned_segments": [pin.to_json() for pin in self.pinned],
            "explanation": list(self.sentences()),
        }

    def sentences(self) -> tuple[str, ...]:
        """What happened and why, in order."""
        failure = self.failure
        first = (
            f"Out of memory at event {failure.event}: {mib(failure.requested_bytes)} were asked for, with "
            f"{mib(failure.live_bytes)} live and {mib(failure.reserved_bytes)} reserved of "
            f"{mib(failure.limit_bytes)}."
        )
        return (first, self._amount(), *self._holes())

    def _amount(self) -> str:
        needed = mib(self.failure.allocated_bytes + self.failure.requested_bytes)
        if self.is_layout:
            return (
                f"What is in use and the request are {needed} together, less than there is: only the layout "
                "fails."
            )
        return (
            f"What is in use and the request are {needed} together, {mib(self.missing_bytes)} more than "
            "there is: no setting of the allocator makes room for that."
        )

    def _holes(self) -> list[str]:
        if not self.free_bytes:
            return []
        too_small = self.largest_hole_bytes < self.failure.requested_bytes
        sentences = [
            f"{mib(self.free_bytes)} lie free inside segments, in {_count(self.hole_count, 'hole')} between "
            f"blocks in use; the largest that this request may take has {mib(self.largest_hole_bytes)}"
            f"{', less than the request' if too_small else ''}."
        ]
        released = self.failure.released_bytes
        sentences.append(
            f"Giving cached segments back released {mib(released)}; every other segment has a block in use."
            if released
            else "No segment is wholly free, so giving cached segments back released nothing."
        )
        if self.pinned:
            free = sum(pin.free_bytes for pin in self.pinned)
            blocks = sum(pin.block_count for pin in self.pinned)
            live = sum(pin.live_bytes for pin in self.pinned)
            sentences.append(
                f"{_count(blocks, 'block')} ({mib(live)}) keep {_count(len(self.pinned), 'segment')} from "
                f"going back, with {mib(free)} stranded in them."
            )
        return sentences


def explain(failure: Failure, layout: Layout, trace: Trace) -> Shortage:
    """Why an allocation failed, from what the allocator held then."""
    small = failure.requested_bytes <= SMALL_LIMIT_BYTES
    pool = "small" if small else "large"
    free = [
        (segment, block)
        for segment in layout.segments
        for block in segment.blocks
        if block.state == FREE_STATE
    ]
    usable = [
        block.size_bytes
        for segment, block in free
        if (segment.pool, segment.stream, segment.private_pool)
        == (pool, failure.stream, failure.private_pool)
    ]
    return Shortage(
        failure=failure,
        free_bytes=sum(block.size_bytes for _, block in free),
        hole_count=len(free),
        usable_free_bytes=sum(usable),
        largest_hole_bytes=max(usable, default=0),
        whole_free_bytes=sum(segment.size_bytes for segment in layout.segments if not segment.active_bytes),
        pinned=pinned_segments(layout, trace),
    )


def pinned_segments(layout: Layout, trace: Trace, *, most_blocks: int = 3) -> tuple[Pinned, ...]:
    """The segments that hold both blocks in use and free bytes, the most free bytes first."""
    lives = _Lives(trace)
    pinned = [
        _pinned(segment, layout, lives, most_blocks)
        for segment in layout.segments
        if 0 < segment.active_bytes < segment.size_bytes
    ]
    return tuple(sorted(pinned, key=lambda pin: (-pin.free_bytes, pin.region, pin.offset_bytes)))


def _pinned(segment: SegmentLayout, layout: Layout, lives: _Lives, most: int) -> Pinned:
    used = [block for block in segment.blocks if block.state != FREE_STATE]
    largest = sorted(used, key=lambda block: (-block.size_bytes, block.offset_bytes))[:most]
    return Pinned(
        region=segment.region,
        offset_bytes=segment.offset_bytes,
        size_bytes=segment.size_bytes,
        free_bytes=segment.size_bytes - segment.active_bytes,
        stream=segment.stream,
        pool=segment.pool,
        block_count=len(used),
        blocks=tuple(
            (
                block.size_bytes,
                *lives.of(layout.owners.get((segment.region, segment.offset_bytes + block.offset_bytes))),
            )
            for block in largest
        ),
    )


class _Lives:
    """Where each block of a trace was asked for, and when it was allocated and freed."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._born = _Moments(trace, Action.ALLOC)
        self._freed = _Moments(trace, Action.FREE)

    def of(self, key: int | None) -> tuple[str, int | None, int | None]:
        born = None if key is None else self._born.of(key)
        if key is None or born is None:
            return "", None, None
        return _place(self._trace, born), born, self._freed.of(key)


class _Moments:
    """The event of one kind that each block has."""

    def __init__(self, trace: Trace, action: Action) -> None:
        self._events = np.flatnonzero((trace.action == action) & (trace.block >= 0))
        self._blocks = trace.block[self._events]
        if (self._blocks[1:] < self._blocks[:-1]).any():
            order = np.argsort(self._blocks, kind="stable")
            self._events, self._blocks = self._events[order], self._blocks[order]

    def of(self, block: int) -> int | None:
        place = int(np.searchsorted(self._blocks, block))
        found = place < len(self._blocks) and self._blocks[place] == block
        return int(self._events[place]) if found else None


def _place(trace: Trace, index: int) -> str:
    """The line, or else the module and operation, that asked for a block."""
    where = trace.strings[trace.where[index]]
    names = (trace.strings[trace.module[index]], trace.strings[trace.op[index]])
    return where or " ".join(name for name in names if name)


def mib(size_bytes: int) -> str:
    """A size as PyTorch's users compare it: ``"1,070 MiB"``; below 1 MiB in KiB."""
    if 0 < size_bytes < MIB:
        return f"{size_bytes / 1024:,.1f} KiB"
    amount = size_bytes / MIB
    return f"{amount:,.0f} MiB" if amount >= 100 or amount.is_integer() else f"{amount:,.1f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def growing_buffers(trace: Trace, *, least_steps: int = 4) -> tuple[Sequence[int], int]:
    """Buffers that are allocated anew, a little larger each time, with the old one freed right after.

    Returns:
        Final sizes of the buffers that grew in at least ``least_steps`` steps, and how many steps there were.
    """
    grown_from: set[int] = set()
    steps_of: dict[int, int] = {}
    freed_at = _Moments(trace, Action.FREE)
    for event, born, recent in _replaced_by_larger(trace):
        block, old = int(trace.block[event]), int(trace.size_bytes[born])
        for alloc in recent:
            heir, size = int(trace.block[alloc]), int(trace.size_bytes[alloc])
            if not old < size <= 4 * old or heir in grown_from:
                continue
            end = freed_at.of(heir)
            if end is None or end > event:
                grown_from.add(heir)
                steps_of[heir] = steps_of.pop(block, 0) + 1
            break
    final = {block: steps for block, steps in steps_of.items() if steps >= least_steps}
    born_at = _Moments(trace, Action.ALLOC)
    events = [born_at.of(block) for block in final]
    return [int(trace.size_bytes[event]) for event in events if event is not None], sum(final.values())


def _replaced_by_larger(trace: Trace) -> Iterator[tuple[int, int, list[int]]]:
    """Frees of large blocks soon after a block of up to four times the size was allocated: the free, the
    allocation of its block, and the last four allocations, the oldest first."""
    born = trace.alloc_index()
    frees = np.flatnonzero((trace.action == Action.FREE) & (born >= 0))
    old = trace.size_bytes[born[frees]]
    frees, old = frees[old > SMALL_LIMIT_BYTES], old[old > SMALL_LIMIT_BYTES]
    allocs = np.flatnonzero(trace.action == Action.ALLOC)
    before = np.searchsorted(allocs, frees)
    likely = np.zeros(len(frees), dtype=bool)
    for back in range(1, 5):
        size = trace.size_bytes[allocs[np.maximum(before - back, 0)]]
        likely |= (before >= back) & (old < size) & (size <= 4 * old)
    for event, count in zip(frees[likely].tolist(), before[likely].tolist(), strict=True):
        yield event, int(born[event]), allocs[max(count - 4, 0) : count].tolist()
