"""Finding the step that repeats in a history of allocations, and places for all of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.allocators.lifetimes import Lifetimes
from memfit.allocators.packing import pack
from memfit.pools.gaps import Gaps
from memfit.pools.taken import TakenRanges

SHORTEST_STEP = 16
"""Allocations that a step has at least: fewer repeat by chance."""
LOOK_AHEAD = 32
LOST_AFTER = 8
_TRIES = 3
PACKING_EFFORT = 2_000
"""Of the search for places: a fraction of a second, while an allocation waits."""


def period_of(sizes: Sequence[int], shortest: int = SHORTEST_STEP) -> int | None:
    """The number of allocations after which they repeat: the least, from ``shortest``, for which the last two
    stretches of that length are equal and at least half of all goes on so; None if there is none.

    Layers repeat inside of a step: what has repeated for less than half of the time may be these.
    """
    for period, length in enumerate(_matches(sizes[::-1])):
        if period >= shortest and length >= max(period, len(sizes) // 2):
            return period
    return None


def _matches(text: Sequence[int]) -> list[int]:
    """For each position, how long what begins there equals the beginning (the Z function; linear time)."""
    lengths = [0] * len(text)
    left = right = 0
    for index in range(1, len(text)):
        length = min(right - index, lengths[index - left]) if index < right else 0
        while index + length < len(text) and text[length] == text[index + length]:
            length += 1
        lengths[index] = length
        if index + length > right:
            left, right = index, index + length
    return lengths


class RepeatedStep:
    """The places of a step's blocks, followed by their sizes from step to step.

    Attributes:
        total_bytes: the memory that the places lie in.
        begins: which allocation of the history, counted from its first, is the step's first.
        served, refused: allocations that did, and did not, get the place that was planned for them.
    """

    def __init__(self, *, sizes: list[int], offsets: list[int | None], total_bytes: int, begins: int) -> None:
        self.total_bytes = total_bytes
        self.begins = begins
        self.served = self.refused = 0
        self._lost = 0  # allocations in a row that are not in the step
        self._sizes = sizes
        self._offsets = offsets  # None: outlives the step, and has no place
        self._next = 0
        self._taken = TakenRanges()

    def __len__(self) -> int:
        return len(self._sizes)

    def free_stretches(self) -> list[tuple[int, int]]:
        """The stretches ``(start, end)`` of the step's memory in which no block lies."""
        return self._taken.gaps(self.total_bytes)

    @property
    def useless(self) -> bool:
        """Whether the steps are others now: it has lost the thread, or most places of a step were refused."""
        refused = self.refused > self.served and self.refused + self.served >= len(self._sizes)
        return refused or self._lost > LOST_AFTER

    def place(self, size_bytes: int) -> int | None:
        """Where the next block goes; None: anywhere else."""
        index = self._find(size_bytes)
        if index is None:
            self.refused += 1
            self._lost += 1
            return None
        self._lost = 0
        if index < self._next:
            self.served = self.refused = 0  # a new step
        self._next = index + 1
        start = self._offsets[index]
        if start is None:
            return None
        if not self._taken.take(start, start + size_bytes):
            self.refused += 1
            return None
        self.served += 1
        return start

    def give_back(self, start: int) -> None:
        """A planned place is free."""
        self._taken.give_back(start)

    def _find(self, size_bytes: int) -> int | None:
        count = len(self._sizes)
        for ahead in range(min(LOOK_AHEAD, count)):
            index = (self._next + ahead) % count
            if self._sizes[index] == size_bytes:
                return index
        return None


def repeated_step(
    history: Sequence[tuple[int, int]], alignment_bytes: int, shortest: int = SHORTEST_STEP
) -> RepeatedStep | None:
    """The step that the end of a history repeats, if it does, with places for its blocks.

    Args:
        history: ``(block, size)`` of an allocation, ``(block, -1)`` of a free.
        alignment_bytes: of the places; sizes are whole multiples.
        shortest: the fewest allocations that it may have.
    """
    born = [event for event, (_, size) in enumerate(history) if size >= 0]
    sizes = [history[event][1] for event in born]
    period = period_of(sizes, shortest)
    if period is None:
        return None
    first = _quietest(history, born, len(born) - 2 * period, period)
    end = born[first + period] if first + period < len(born) else len(history)
    died = {block: event for event, (block, size) in enumerate(history) if size < 0}
    lives = [
        (event, died.get(history[event][0], end), history[event][1]) for event in born[first : first + period]
    ]
    inside = [index for index, (_, upper, _) in enumerate(lives) if upper < end]
    packing = pack(
        Lifetimes.of(lives[index] for index in inside), alignment_bytes=alignment_bytes, effort=PACKING_EFFORT
    )
    offsets: list[int | None] = [None] * period
    for index, offset in zip(inside, packing.offsets.tolist(), strict=True):
        offsets[index] = offset
    return RepeatedStep(
        sizes=sizes[first : first + period],
        offsets=offsets,
        total_bytes=packing.height_bytes,
        begins=first % period,
    )


def _quietest(history: Sequence[tuple[int, int]], born: list[int], start: int, period: int) -> int:
    """The allocation of the last step but one before which the fewest bytes are live: there the step is cut,
    so that few of its blocks outlive it."""
    sizes: dict[int, int] = {}
    live = count = 0
    least, chosen = -1, start
    for block, size in history:
        if size < 0:
            live -= sizes.pop(block, 0)
            continue
        if start <= count < start + period and (least < 0 or live < least):
            least, chosen = live, count
        sizes[block] = size
        live += size
        count += 1
    return chosen


class PlannedSteps:
    """A step that repeats, at work in a part of an address space that is taken for it.

    The part is taken when the step next begins, and only where it makes the space that is needed no larger
    than it has been already. It is given back when the steps are others now.

    Attributes:
        ended: a step was at work and is no more; its owner sets this back.
        shortest: the fewest allocations that a step must have: more than one that has ended, which may have
            been a layer and not a step.
    """

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._step: RepeatedStep | None = None
        self._region: int | None = None
        self._seen = 0
        self._tries = 0
        self._blocks: set[int] = set()
        self.ended = False
        self.shortest = SHORTEST_STEP

    @property
    def at_work(self) -> bool:
        """Whether blocks are served from places packed ahead."""
        return self._region is not None

    @property
    def planned_bytes(self) -> int:
        """The part of the address space that is taken for the step."""
        return self._step.total_bytes if self._step is not None and self.at_work else 0

    def await_step(self, step: RepeatedStep, *, seen: int) -> None:
        """Have a step served from when it next begins; ``seen`` allocations of its history are over."""
        if not self.at_work:
            self._step, self._seen, self._tries = step, seen, _TRIES

    def place(self, block_id: int, size_bytes: int) -> int | None:
        """Where a block goes; None: nowhere in particular."""
        step = self._step
        if step is None:
            return None
        if self._region is None and not self._begin(step):
            return None
        assert self._region is not None
        offset = step.place(size_bytes)
        if offset is None:
            if step.useless:
                self.give_up()
            return None
        self._blocks.add(block_id)
        return self._region + offset

    def give_back(self, block_id: int, start: int) -> bool:
        """Take a block back, if it lay in a planned place."""
        if block_id not in self._blocks:
            return False
        assert self._step is not None
        assert self._region is not None
        self._blocks.remove(block_id)
        self._step.give_back(start - self._region)
        return True

    def give_up(self) -> bool:
        """Serve no more steps; whether there was one. What is free of its memory is free for all at once, and
        what blocks still lie in when they are given back."""
        if self._step is None or self._region is None:
            return False
        for start, end in self._step.free_stretches():
            self._gaps.give_back(self._region + start, end - start)
        self.shortest = 2 * len(self._step)
        self._step = self._region = None
        self._blocks.clear()
        self.ended = True
        return True

    def _begin(self, step: RepeatedStep) -> bool:
        """Take memory for the step if it begins now and there is a good place."""
        begins = self._seen % len(step) == step.begins
        self._seen += 1
        if not begins:
            return False
        gaps = self._gaps
        gap = gaps.best(step.total_bytes)
        if gap is not None:
            self._region = gaps.take(gap, step.total_bytes)
        elif gaps.top_bytes + step.total_bytes <= gaps.peak_bytes:
            self._region = gaps.extend(step.total_bytes)
        self._tries -= 1
        if self._region is None and not self._tries:
            self._step = None
        return self._region is not None
