"""Events through an allocator's arrays: columns made ready, tables grown, states handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.allocators.caching import CachingAllocator
from memfit.allocators.chunks import Chunk
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.fields import NONE, Columns, Ints
from memfit.allocators.fast.jit import has_numba
from memfit.core.trace import Action

FEWEST_EVENTS = 200_000
"""Below this the reference is done before numba is even imported."""
LARGEST_SIZE = 1 << 60
LARGEST_ADDRESS = 1 << 62
MOST_STREAMS = 1 << 20

Lane = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Columns of events, one to one; see `memfit.core.trace.Trace` for what they mean.

    Attributes:
        lanes: the stream and private pool behind a stream number, where there is a private pool.
    """

    action: npt.NDArray[np.uint8]
    block: Ints
    size_bytes: Ints
    stream: npt.NDArray[np.int32]
    address: Ints
    lanes: Mapping[int, Lane]

    def __len__(self) -> int:
        return len(self.action)

    def suit(self) -> bool:
        """Whether all numbers are such that nothing overflows and the tables stay small."""
        if not len(self):
            return True
        return bool(
            self.size_bytes.max() < LARGEST_SIZE
            and self.stream.min() >= 0
            and self.stream.max() < MOST_STREAMS
            and self.address.min(initial=0) >= 0
            and self.address.max(initial=0) < LARGEST_ADDRESS
        )


def is_worth_it(events: Events) -> bool:
    """Whether the arrays are the faster way to run these events, here."""
    return len(events) >= FEWEST_EVENTS and has_numba() and events.suit()


class Engine:
    """An allocator's state as arrays, with events to run on it.

    Args:
        allocator: where to begin; it is left alone until `store`.
        events: what to run.
        chunks: the blocks in use, by number.
        known: addresses of segments that lie where they lay in the run.
        exact: segments that go back in the events go back alone.
        kept_after: the last allocation; what failed after it in the run stays where it succeeds.
        detailed: keep totals after each event, and compare places with the recorded ones.
    """

    def __init__(
        self, allocator: CachingAllocator, events: Events, *, chunks: Mapping[int, Chunk] | None = None,
        known: Iterable[int] = (), exact: bool = False, kept_after: int = -1, detailed: bool = False,
    ) -> None:  # fmt: skip
        from memfit.allocators.fast import events as compiled
        from memfit.allocators.fast import state

        self._advance, self._state = compiled.advance, state
        self._events, self._allocator = events, allocator
        lanes, table = _lanes(allocator, events)
        self.arrays = state.load(allocator, lanes, known=known)
        self._numbers = self.arrays.numbers
        chunks = chunks or {}
        self._least, count, block = _numbered(events.block, chunks)
        self.columns = Columns(
            action=_readonly(events.action),
            block=_readonly(block),
            size=_readonly(events.size_bytes),
            stream=_readonly(events.stream),
            address=_readonly(events.address if detailed or exact else events.address[:0]),
            lane=table,
            slots=np.full(count, NONE, dtype=np.int32),
            placements=np.empty((int(np.count_nonzero(events.action == Action.ALLOC)), 2), dtype=np.int64),
            changes=np.empty((1 << 10, 2), dtype=np.int64),
            totals=np.empty((len(events) if detailed else 0, 3), dtype=np.int64),
        )
        self._numbers[f.EXACT], self._numbers[f.KEPT_AFTER] = exact, kept_after
        self._numbers[f.LEAST_BLOCK] = self._least
        for key, chunk in chunks.items():
            self.columns.slots[key - self._least] = state.row_at(
                self.arrays, chunk.region.ordinal, chunk.offset
            )

    def run(self, start: int, stop: int) -> tuple[bool, int]:
        """Run events from ``start`` to before ``stop``, or to after one that ran out of memory.

        Returns:
            Whether one did, and the next event.
        """
        while True:
            status, start = self._advance(self.arrays, self.columns, start, stop)
            if status != f.NEEDS_ROOM:
                return status == f.FAILED, int(start)
            self.arrays = self._state.with_room(self.arrays)
            changes = self.columns.changes
            if 2 * self._numbers[f.CHANGES] > len(changes):
                self.columns = self.columns._replace(changes=np.concatenate([changes, changes]))

    def store(self) -> dict[int, Chunk]:
        """Put the allocator into the state that was reached; its blocks in use come back by number."""
        made = self._state.store(self.arrays, self._allocator)
        slots = self.columns.slots
        live = np.flatnonzero(slots != NONE)
        pairs = zip((live + self._least).tolist(), slots[live].tolist(), strict=True)
        return {key: made[row] for key, row in pairs}

    def number(self, place: int) -> int:
        """One of the single numbers, by its name in `fields`."""
        return int(self._numbers[place])

    @property
    def placements(self) -> Ints:
        """``(region, offset)`` per allocation that was tried."""
        return self.columns.placements[: self.number(f.PLACEMENTS)]

    @property
    def changes(self) -> Ints:
        """``(event, reserved bytes)`` each time they changed."""
        return self.columns.changes[: self.number(f.CHANGES)].copy()


def _lanes(allocator: CachingAllocator, events: Events) -> tuple[list[Lane], npt.NDArray[np.int32]]:
    """Every lane, and the lane of each stream number."""
    used = np.flatnonzero(np.bincount(events.stream)) if len(events) else np.zeros(0, dtype=np.int64)
    table = np.zeros(int(used[-1]) + 1 if len(used) else 1, dtype=np.int32)
    lanes: dict[Lane, int] = {}
    for stream in used.tolist():
        lane = events.lanes.get(stream, (stream, 0))
        table[stream] = lanes.setdefault(lane, len(lanes))
    for stream, _, pool in allocator.lanes():
        lanes.setdefault((stream, pool), len(lanes))
    return list(lanes), table


def _numbered(block: Ints, chunks: Mapping[int, Chunk]) -> tuple[int, int, Ints]:
    """The least number of a block, how many numbers there are from it on, and the numbers themselves."""
    least = min(int(block.min(initial=-1)), min(chunks, default=0))
    most = max(int(block.max(initial=-1)), max(chunks, default=0))
    return least, most - least + 1, block


def _readonly(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that numba has one type for, whatever it came from."""
    view = np.ascontiguousarray(column).view()
    view.flags.writeable = False
    return view
