"""The state before a history, found by going through it backwards from the state at its end.

Every event is undone: what was allocated becomes free, what was freed is in use again. A history tells what
was asked for, and a large block may have kept a rest of up to 1 MiB that PyTorch did not split off. Two
things tell of it: in the pool of large blocks no free piece is that small, so a gap of that size belongs to
the block before it; and what is first allocated behind a block, while it lives, begins where it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memfit.core.snapshot import BlockState, Segment, Snapshot, SnapshotBlock
from memfit.core.trace import Action
from memfit.formats.history import REQUESTED, Step, Steps

BLOCK_BYTES = 512
SMALL_SEGMENT_BYTES = 2 << 20
LARGEST_UNSPLIT_REST_BYTES = 1 << 20


class Start(NamedTuple):
    """A state, and how many events did not agree with it."""

    snapshot: Snapshot
    contradictions: int


class _Range(NamedTuple):
    size: int
    stream: int
    pool: Literal["small", "large"]
    expandable: bool


@dataclass
class _Active:
    size: int  # 0: not known, from the gap
    requested: int
    state: BlockState
    where: str
    freed: int = 0  # the step that freed it, where its size is not known


class Held:
    """Reserved bytes over a history."""

    @staticmethod
    def over(start: Snapshot | None, steps: Steps, index: int) -> int:
        """What was reserved before step ``index``."""
        held = 0 if start is None else start.reserved_bytes
        for action, size in zip(steps.actions[:index], steps.sizes[:index], strict=True):
            if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
                held += size
            elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
                held -= size
        return max(held, 0)


def starting_state(segments: Sequence[Segment], steps: Steps) -> Start:
    """The state from which ``steps`` led to ``segments``."""
    undo = _Undo(segments, _Allocations(steps))
    index = len(steps)
    for step in reversed(steps):
        index -= 1
        undo.undo(index, step)
    return Start(undo.snapshot(), undo.contradictions)


class _Allocations:
    """Where and when a history allocates, by address."""

    def __init__(self, steps: Steps) -> None:
        found = sorted(
            (step.address, index) for index, step in enumerate(steps) if step.action == Action.ALLOC
        )
        self._addresses = [address for address, _ in found]
        self._indices = [index for _, index in found]

    def first_behind(self, begin: int, end: int, before: int) -> int | None:
        """The lowest address from ``begin`` to below ``end`` that is allocated before step ``before``."""
        for place in range(bisect_left(self._addresses, begin), bisect_left(self._addresses, end)):
            if self._indices[place] < before:
                return self._addresses[place]
        return None


class _Undo:
    def __init__(self, segments: Sequence[Segment], allocations: _Allocations) -> None:
        self.contradictions = 0
        self._allocations = allocations
        self._ranges = {
            segment.address: _Range(segment.size_bytes, segment.stream, segment.pool, segment.expandable)
            for segment in segments
        }
        self._active = {
            block.address: _Active(block.size_bytes, block.requested_bytes, block.state, block.where)
            for segment in segments
            for block in segment.blocks
            if block.active
        }

    def undo(self, index: int, step: Step) -> None:
        """Go back over one step."""
        action, address = step.action, step.address
        if action == Action.ALLOC:
            self._expect(self._active.pop(address, None) is not None)
        elif action == Action.FREE:
            self._expect(address not in self._active)
            self._active[address] = _Active(0, step.size_bytes, "allocated", "", index)
        elif action == REQUESTED:
            block = self._active.get(address)
            self._expect(block is not None)
            if block is not None:
                block.state = "allocated"
        elif action == Action.SEGMENT_ALLOC:
            self._expect(self._ranges.pop(address, None) is not None)
        elif action == Action.SEGMENT_FREE:
            self._add(step, expandable=False)
        elif action == Action.SEGMENT_MAP:
            self._unmap(address, step.size_bytes)
        elif action == Action.SEGMENT_UNMAP:
            self._add(step, expandable=True)

    def _expect(self, agrees: bool) -> None:
        self.contradictions += not agrees

    def _add(self, step: Step, *, expandable: bool) -> None:
        small = step.size_bytes % (20 << 20) != 0 if expandable else step.size_bytes == SMALL_SEGMENT_BYTES
        pool: Literal["small", "large"] = "small" if small else "large"
        self._expect(step.address not in self._ranges)
        self._ranges[step.address] = _Range(step.size_bytes, step.stream, pool, expandable)

    def _unmap(self, address: int, size: int) -> None:
        """Take a stretch out of the mapped ranges, which may leave one before it and one behind it."""
        left = size
        for begin in sorted(self._ranges):
            found = self._ranges[begin]
            end = begin + found.size
            low, high = max(begin, address), min(end, address + size)
            if low >= high:
                continue
            del self._ranges[begin]
            left -= high - low
            if begin < low:
                self._ranges[begin] = found._replace(size=low - begin)
            if high < end:
                self._ranges[high] = found._replace(size=end - high)
        self._expect(left == 0)

    def snapshot(self) -> Snapshot:
        addresses = sorted(self._active)
        segments = []
        begin_free = 0
        for begin, found in self._joined():
            if begin < begin_free:  # ranges that overlap cannot both be true
                self.contradictions += 1
                continue
            inside = addresses[bisect_left(addresses, begin) : bisect_left(addresses, begin + found.size)]
            segments.append(
                Segment(
                    address=begin,
                    size_bytes=found.size,
                    stream=found.stream,
                    pool=found.pool,
                    expandable=found.expandable,
                    blocks=tuple(self._blocks(begin, found, inside)),
                )
            )
            begin_free = begin + found.size
        covered = sum(sum(block.active for block in segment.blocks) for segment in segments)
        self.contradictions += len(addresses) - covered
        return Snapshot(segments=tuple(segments))

    def _joined(self) -> list[tuple[int, _Range]]:
        """The ranges by address; mapped ones that touch are one."""
        joined: list[tuple[int, _Range]] = []
        for begin in sorted(self._ranges):
            found = self._ranges[begin]
            if joined and found.expandable and joined[-1][1].expandable:
                before, last = joined[-1]
                if before + last.size == begin and last.stream == found.stream:
                    joined[-1] = (before, last._replace(size=last.size + found.size))
                    continue
            joined.append((begin, found))
        return joined

    def _blocks(self, begin: int, found: _Range, inside: Sequence[int]) -> list[SnapshotBlock]:
        """The blocks of a segment: the active ones, and what is free between them."""
        end = begin + found.size
        blocks: list[SnapshotBlock] = []
        at = begin
        for place, address in enumerate(inside):
            if address < at:  # it would lie in the block before it
                continue
            if address > at:
                blocks.append(_free(at, address - at))
            following = inside[place + 1] if place + 1 < len(inside) else end
            active = self._active[address]
            size = self._size(active, address, following, found)
            blocks.append(
                SnapshotBlock(
                    address=address,
                    size_bytes=size,
                    requested_bytes=active.requested,
                    state=active.state,
                    where=active.where,
                )
            )
            at = address + size
        if at < end:
            blocks.append(_free(at, end - at))
        return blocks

    def _size(self, active: _Active, address: int, following: int, found: _Range) -> int:
        """The size of a block, with the rest that was not split off it."""
        room = following - address
        if active.size:
            return min(active.size, room)
        size = min(max(-(-active.requested // BLOCK_BYTES), 1) * BLOCK_BYTES, room)
        if found.pool == "small" or found.expandable:
            return size
        if room - size <= LARGEST_UNSPLIT_REST_BYTES:
            return room
        end = address + size
        behind = self._allocations.first_behind(end, end + LARGEST_UNSPLIT_REST_BYTES + 1, active.freed)
        return size if behind is None else behind - address


def _free(address: int, size: int) -> SnapshotBlock:
    return SnapshotBlock(address=address, size_bytes=size, requested_bytes=0, state="inactive")
