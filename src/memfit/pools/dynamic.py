"""Dynamic allocation: a policy that watches sizes and lifetimes, and changes how it places blocks."""

# ruff: noqa: PLR1730  -- max() costs three times the comparison, and every allocation comes by here

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.core.errors import UsageError
from memfit.pools.gaps import Gaps
from memfit.pools.repeats import PlannedSteps, repeated_step

FIRST_LOOK = 512
"""Operations before the first look back; each look comes after twice as many."""
LONGEST_HISTORY = 1 << 16
"""Operations that are looked back on at most; after as many, history begins anew."""
GOOD_ENOUGH = 0.01
"""Address space over the most live bytes, as a share, below which nothing is looked for."""
WORTH_A_CHANGE = 0.005
"""Share of the address space that another manner must save."""
LONG_LIFE = 256
"""Operations after which a block counts as long-lived: about two layers of a transformer."""

_MEMORY = 0.7
_ADDRESS_SPACE_BYTES = 1 << 47

Fit = Literal["best_fit", "first_fit", "by_lifetime"]


@dataclass(frozen=True, kw_only=True)
class Manner:
    """One way of placing blocks.

    Attributes:
        fit: ``best_fit`` the smallest gap; ``first_fit`` the lowest gap; ``by_lifetime`` what is expected to
            live long in the lowest gap, the rest at the upper end of the smallest one.
        classes: sizes are rounded up to this many classes between two powers of two (0: not at all), so that
            blocks of about one size fit in each other's place.
    """

    fit: Fit
    classes: int = 0

    def __str__(self) -> str:
        return f"{self.fit}, {self.classes} classes" if self.classes else self.fit


MANNERS: tuple[Manner, ...] = (
    Manner(fit="best_fit"),
    Manner(fit="by_lifetime"),
    Manner(fit="first_fit"),
    Manner(fit="best_fit", classes=8),
)
"""What is tried; the first is what it begins with."""


class Change(NamedTuple):
    """A change of manner: after how many operations, and to what."""

    operation: int
    manner: Manner


class Lifetimes:
    """How long blocks of each size have lived, in operations: a running average, the newest most."""

    __slots__ = ("_average",)

    def __init__(self) -> None:
        self._average: dict[int, float] = {}

    def saw(self, size_bytes: int, operations: int) -> None:
        """A block has died."""
        before = self._average.get(size_bytes, operations)
        self._average[size_bytes] = _MEMORY * before + (1 - _MEMORY) * operations

    def lives_long(self, size_bytes: int) -> bool:
        """Whether the next block of that size is expected to; one never seen to die is."""
        return self._average.get(size_bytes, LONG_LIFE) >= LONG_LIFE


class DynamicAllocation(BaseAllocator):
    """An allocator that follows the workload.

    It keeps the history of what was asked for, and now and then looks back: where more address space was
    needed than `GOOD_ENOUGH` over the bytes that were live, the history is replayed in every `Manner`, and
    the one that would have needed the least places blocks from then on. Looks come after twice as many
    operations each, so they cost little per operation. Blocks never move: manners share one set of gaps.

    Where the history ends in a step that was the same twice, its blocks are packed ahead, and the steps that
    follow are served from these places; blocks that a step has no place for go where they always went.

    Args:
        config: with ``total_bytes`` (128 TiB without) and ``alignment_bytes`` (1 without).

    Attributes:
        manner: the current one.
        changes: those made so far.

    Examples:
        >>> allocator = DynamicAllocation()
        >>> block = allocator.allocate(1000)
        >>> allocator.deallocate(block)
        >>> str(allocator.manner)
        'best_fit'
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self.manner = MANNERS[0]
        self.changes: list[Change] = []
        self.operations = 0
        self._alignment_bytes = getattr(config, "alignment_bytes", 1) or 1
        self._gaps = Gaps(getattr(config, "total_bytes", None) or _ADDRESS_SPACE_BYTES)
        self._lifetimes = Lifetimes()
        self._out: dict[int, tuple[int, int, int]] = {}  # start, size, when, by block
        self._next_id = 0
        self._history: list[tuple[int, int]] = []  # block, and what was asked for (-1: freed)
        self._next_look = FIRST_LOOK
        self._before = self._gaps.copy()
        self._out_before: dict[int, tuple[int, int]] = {}
        self._steps = PlannedSteps(self._gaps)
        self._requested = self._allocated = 0
        self._peaks = [0, 0]
        self._sums = [0, 0]

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Hand out a block.

        Raises:
            OutOfMemory: no gap fits, and the space ends.
            UsageError: a negative size.
        """
        if size_bytes < 0:
            raise UsageError(f"allocate({size_bytes}): a size cannot be negative")
        size = rounded(size_bytes, 0, self._alignment_bytes)
        start = self._steps.place(self._next_id, size)
        if start is None:
            start, size = self._place(size_bytes, size)
        if start is None:
            raise OutOfMemory(
                requested_bytes=size_bytes,
                reserved_bytes=self._gaps.top_bytes,
                limit_bytes=self._gaps.total_bytes,
                allocated_bytes=self._allocated,
            )
        block = Block(
            block_id=self._next_id,
            address=start,
            size_bytes=size,
            requested_bytes=size_bytes,
            stream=stream,
            region=0,
            offset_bytes=start,
        )
        self._next_id += 1
        self._out[block.block_id] = (start, size, self.operations)
        self._count(size_bytes, size)
        self._saw(block.block_id, size_bytes)
        return block

    def deallocate(self, block: Block) -> None:
        """Take a block back.

        Raises:
            UsageError: it is not out.
        """
        entry = self._out.get(block.block_id)
        if entry is None or entry[0] != block.offset_bytes:
            raise UsageError(f"block {block.block_id} is not out: freed twice, or of another allocator")
        del self._out[block.block_id]
        start, size, born = entry
        if not self._steps.give_back(block.block_id, start):
            self._gaps.give_back(start, size)
        self._lifetimes.saw(size, self.operations - born)
        self._requested -= block.requested_bytes
        self._allocated -= size
        self._saw(block.block_id, -1)

    def stats(self) -> Mapping[str, Any]:
        """As `BaseAllocator.stats`; ``reserved_bytes`` is the address space from 0 to the highest block."""
        gaps, sums, peaks = self._gaps, self._sums, self._peaks
        return {
            "requested_bytes": {"all": [self._requested, peaks[0], sums[0], sums[0] - self._requested]},
            "allocated_bytes": {"all": [self._allocated, peaks[1], sums[1], sums[1] - self._allocated]},
            "reserved_bytes": {"all": [gaps.top_bytes, gaps.peak_bytes, gaps.peak_bytes, 0]},
            "manner": str(self.manner),
            "manner_changes": len(self.changes),
            "planned_bytes": self._steps.planned_bytes,
        }

    def _place(self, size_bytes: int, size: int) -> tuple[int | None, int]:
        """Where a block goes that no step has a place for, and its size, in the current manner. Before there
        is no room, sizes are not rounded to classes, and the memory of a planned step is given up."""
        manner, gaps = self.manner, self._gaps
        in_class = rounded(size_bytes, manner.classes, self._alignment_bytes)
        if (
            self._steps.at_work
            and gaps.top_bytes + in_class > gaps.peak_bytes
            and gaps.best(in_class) is None
        ):
            self._steps.give_up()  # what is asked for besides the step is more than its memory saves
        start = place(self._gaps, in_class, manner.fit, self._lifetimes)
        if start is not None:
            return start, in_class
        start = place(self._gaps, size, manner.fit, self._lifetimes)
        if start is None and self._steps.give_up():
            start = place(self._gaps, size, manner.fit, self._lifetimes)
        return start, size

    def _count(self, requested_bytes: int, size_bytes: int) -> None:
        self._requested += requested_bytes
        self._allocated += size_bytes
        self._sums[0] += requested_bytes
        self._sums[1] += size_bytes
        if self._requested > self._peaks[0]:
            self._peaks[0] = self._requested
        if self._allocated > self._peaks[1]:
            self._peaks[1] = self._allocated

    def _saw(self, block_id: int, size_bytes: int) -> None:
        self.operations += 1
        if self._steps.at_work:
            return
        if self._steps.ended:
            self._begin_history(FIRST_LOOK)  # what is out by now includes this operation
            return
        self._history.append((block_id, size_bytes))
        if len(self._history) >= self._next_look:
            self._look_back()

    def _look_back(self) -> None:
        if self._gaps.peak_bytes > (1 + GOOD_ENOUGH) * self._peaks[0]:
            self._choose()
            self._find_step()
        self._next_look *= 2
        if self._next_look > LONGEST_HISTORY:
            self._begin_history(LONGEST_HISTORY)

    def _find_step(self) -> None:
        """If the history ends in a step that repeats, have the next ones served from places packed ahead."""
        exact = [
            (block, size if size < 0 else rounded(size, 0, self._alignment_bytes))
            for block, size in self._history
        ]
        step = repeated_step(exact, self._alignment_bytes, self._steps.shortest)
        if step is not None:
            self._steps.await_step(step, seen=sum(size >= 0 for _, size in exact))

    def _choose(self) -> None:
        """Which manner would have needed the least? Change to it, if it is worth it."""
        needed = {manner: self._needed(manner) for manner in MANNERS}
        chosen = min(MANNERS, key=needed.__getitem__)
        if needed[chosen] < (1 - WORTH_A_CHANGE) * needed[self.manner]:
            self.manner = chosen
            self.changes.append(Change(self.operations, chosen))

    def _begin_history(self, next_look: int) -> None:
        """Forget: what is out now is how it begins, and peaks count from here."""
        self._steps.ended = False
        self._history.clear()
        self._next_look = next_look
        self._before = self._gaps.copy()
        self._out_before = {block: (start, size) for block, (start, size, _) in self._out.items()}

    def _needed(self, manner: Manner) -> int:
        """The highest end of a block in the history, had it been served in a manner."""
        gaps, out = self._before.copy(), dict(self._out_before)
        for block_id, asked in self._history:
            if asked < 0:
                gaps.give_back(*out.pop(block_id))
                continue
            size = rounded(asked, manner.classes, self._alignment_bytes)
            start = place(gaps, size, manner.fit, self._lifetimes)
            if start is None:
                return gaps.total_bytes + 1
            out[block_id] = (start, size)
        return gaps.peak_bytes


def place(gaps: Gaps, size_bytes: int, fit: Fit, lifetimes: Lifetimes) -> int | None:
    """Where a block goes; None where the space ends."""
    from_end = False
    if fit == "best_fit":
        gap = gaps.best(size_bytes)
    elif fit == "first_fit" or lifetimes.lives_long(size_bytes):
        gap = gaps.lowest(size_bytes)
    else:
        gap, from_end = gaps.highest_best(size_bytes), True
    if gap is None:
        return gaps.extend(size_bytes)
    return gaps.take(gap, size_bytes, from_end=from_end)


def rounded(size_bytes: int, classes: int, alignment_bytes: int) -> int:
    """A size in whole units of alignment, at least one; in size classes if there are any."""
    if classes and size_bytes > classes * alignment_bytes:
        step = 1 << max(0, (size_bytes - 1).bit_length() - 1 - (classes - 1).bit_length())
        size_bytes = -(-size_bytes // step) * step
    return -(-max(size_bytes, 1) // alignment_bytes) * alignment_bytes
