"""A step that repeats: its allocations recorded once, packed, and served from fixed places after that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.core.errors import UsageError
from memfit.pools.taken import TakenRanges

LOOK_AHEAD = 32
"""How many entries a step may leave out before what follows counts as unknown to the plan."""


class PlannedBlock(NamedTuple):
    """One allocation of a step: its size, and where it lies."""

    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Where each allocation of a step that repeats goes.

    Attributes:
        blocks: in the order in which the step asks for them.
        total_bytes: the memory that they lie in.
    """

    blocks: tuple[PlannedBlock, ...]
    total_bytes: int

    @classmethod
    def of(cls, blocks: Iterable[tuple[int, int]]) -> StepPlan:
        """A plan from ``(size_bytes, offset_bytes)`` in order.

        Raises:
            UsageError: a negative size or offset.
        """
        planned = tuple(PlannedBlock(size, offset) for size, offset in blocks)
        for index, block in enumerate(planned):
            if block.size_bytes < 0 or block.offset_bytes < 0:
                raise UsageError(f"entry {index} of the plan, {tuple(block)}, has a negative number")
        total = max((block.size_bytes + block.offset_bytes for block in planned), default=0)
        return cls(blocks=planned, total_bytes=total)


class RecordedBlock(NamedTuple):
    """One allocation of a recorded step: its size, and the events between which it lived."""

    size_bytes: int
    born: int
    died: int


class Recorder:
    """Notes what a step asks of a pool; the pool calls it."""

    def __init__(self) -> None:
        self._events = 0
        self._born: dict[int, tuple[int, int]] = {}
        self._blocks: list[RecordedBlock] = []

    def took(self, key: int, size_bytes: int) -> None:
        """A block went out."""
        self._born[key] = (size_bytes, self._events)
        self._events += 1

    def gave_back(self, key: int) -> None:
        """A block came back; one from before the recording does not count."""
        if key in self._born:
            size_bytes, born = self._born.pop(key)
            self._blocks.append(RecordedBlock(size_bytes, born, self._events))
            self._events += 1

    def blocks(self) -> tuple[RecordedBlock, ...]:
        """The blocks that were allocated and freed within the step, in the order of allocation. Those that
        outlive it are state, which the next step finds and does not ask for again."""
        return tuple(sorted(self._blocks, key=lambda block: block.born))


class PlannedPolicy(BaseAllocator):
    """Gives each allocation of a step the place that a plan has for it, and refuses all others.

    The step is followed by its sizes. One that the plan does not have next is looked for a little further on
    (the step left something out); if it is not there either it is refused, and so it is where a block that
    has lived longer than planned lies in its place.
    """

    def __init__(self, config: StepPlan, *, alignment_bytes: int = 1) -> None:
        unit = alignment_bytes
        self.plan = config
        self._sizes = [-(-max(block.size_bytes, 1) // unit) * unit for block in config.blocks]
        self._offsets = [block.offset_bytes for block in config.blocks]
        if any(offset % unit for offset in self._offsets):
            raise UsageError(
                f"the plan has offsets that are no multiples of {unit}, as this device needs them"
            )
        self.total_bytes = max(map(sum, zip(self._sizes, self._offsets, strict=True)), default=0)
        self._taken = TakenRanges()
        self._next = 0
        self._made = 0
        self.served = self.refused = 0

    def begin_step(self) -> None:
        """The next allocation is the plan's first."""
        self._next = 0

    def retire(self) -> None:
        """Give no place any more."""
        self._sizes = []

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """The planned block.

        Raises:
            OutOfMemory: the plan has none for this.
        """
        index = self._find(size_bytes)
        if index is not None:
            self._next = index + 1
            start = self._offsets[index]
            if self._taken.take(start, start + size_bytes):
                self.served += 1
                return self._block(start, size_bytes, stream)
        self.refused += 1
        raise OutOfMemory(
            requested_bytes=size_bytes,
            reserved_bytes=self.total_bytes,
            limit_bytes=self.total_bytes,
            allocated_bytes=self._taken.total_bytes,
        )

    def deallocate(self, block: Block) -> None:
        """The planned place is free."""
        if not self._taken.give_back(block.offset_bytes):
            raise UsageError(f"the block at {block.offset_bytes} is not out")

    def stats(self) -> Mapping[str, Any]:
        used = self._taken.total_bytes
        held = [used, used, used, 0]
        total = [self.total_bytes, self.total_bytes, self.total_bytes, 0]
        return {
            "allocated_bytes": {"all": held},
            "requested_bytes": {"all": held},
            "reserved_bytes": {"all": total},
        }

    def _find(self, size_bytes: int) -> int | None:
        for index in range(self._next, min(self._next + LOOK_AHEAD, len(self._sizes))):
            if self._sizes[index] == size_bytes:
                return index
        return None

    def _block(self, start: int, size_bytes: int, stream: int) -> Block:
        self._made += 1
        return Block(
            block_id=self._made,
            address=start,
            size_bytes=size_bytes,
            requested_bytes=size_bytes,
            stream=stream,
            region=0,
            offset_bytes=start,
        )
