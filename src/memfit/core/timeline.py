"""Memory over a trace: live, allocated and reserved bytes after every event, and who is live at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.trace import CATEGORIES, PHASES, Action, Trace

Bytes = npt.NDArray[np.int64]

_ROUND_BYTES = 512
_ALLOC, _FREE = int(Action.ALLOC), int(Action.FREE)
_MORE_RESERVED = (int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_MAP))
_LESS_RESERVED = (int(Action.SEGMENT_FREE), int(Action.SEGMENT_UNMAP))


@dataclass(frozen=True, kw_only=True)
class LiveBlocks:
    """The blocks that are live after one event.

    Args:
        index: that event.
        allocs: indices of the ALLOC events of the live blocks, in order of allocation.
        trace: the trace that they are in.
    """

    index: int
    allocs: npt.NDArray[np.int64]
    trace: Trace

    @property
    def total_bytes(self) -> int:
        """Requested bytes of all of them."""
        return int(self.trace.size_bytes[self.allocs].sum())

    @property
    def by_block(self) -> dict[int, int]:
        """Requested bytes by block id, the largest first."""
        order = np.argsort(-self.trace.size_bytes[self.allocs], kind="stable")
        allocs = self.allocs[order]
        blocks, sizes = self.trace.block[allocs].tolist(), self.trace.size_bytes[allocs].tolist()
        return dict(zip(blocks, sizes, strict=True))

    @property
    def by_category(self) -> dict[str, int]:
        """Requested bytes by category, in the order of `CATEGORIES`; those that hold nothing are absent."""
        held = self.by("category")
        return {name: held[name] for name in CATEGORIES if held.get(name)}

    def by(self, column: str) -> dict[str, int]:
        """Requested bytes by the text of any text column (``"module"``, ``"op"`` …), the largest first."""
        texts, inverse = np.unique(getattr(self.trace, column)[self.allocs], return_inverse=True)
        sums = np.zeros(len(texts), dtype=np.int64)
        np.add.at(sums, inverse, self.trace.size_bytes[self.allocs])
        order = np.argsort(-sums, kind="stable")
        return {self.trace.strings[texts[place]]: int(sums[place]) for place in order}


@dataclass(frozen=True, kw_only=True)
class StackedSeries:
    """Live requested bytes by category at chosen events; the categories add up to the total.

    Args:
        index: the chosen events, rising.
        bytes_by_category: for each category that is ever live, its bytes after each chosen event.
    """

    index: npt.NDArray[np.int64]
    bytes_by_category: Mapping[str, Bytes]

    @property
    def total_bytes(self) -> Bytes:
        """The sum over the categories."""
        return sum(self.bytes_by_category.values(), np.zeros(len(self.index), dtype=np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Bytes after every event of a trace.

    Args:
        trace: what it is of.
        live_bytes: requested bytes of all live blocks.
        allocated_bytes: the same, each block rounded up to 512 bytes as PyTorch's allocator does (without the
            rests of blocks that it does not split).
        reserved_bytes: bytes of all segments; all zero when the trace has no segment events.
    """

    trace: Trace
    live_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    _alloc_index: npt.NDArray[np.int64]

    @staticmethod
    def of(trace: Trace) -> Timeline:
        """The timeline of a trace. A free without an allocation in the trace changes nothing."""
        alloc_index = trace.alloc_index()
        paired = (
            np.where(alloc_index >= 0, trace.size_bytes[alloc_index], 0) if len(trace) else trace.size_bytes
        )
        signs = _signs(trace.action, (_ALLOC,), (_FREE,))
        rounded = np.where(paired > 0, np.maximum(-(-paired // _ROUND_BYTES), 1) * _ROUND_BYTES, 0)
        segments = _signs(trace.action, _MORE_RESERVED, _LESS_RESERVED) * trace.size_bytes
        return Timeline(
            trace=trace,
            live_bytes=np.cumsum(signs * paired),
            allocated_bytes=np.cumsum(signs * rounded),
            reserved_bytes=np.cumsum(segments),
            _alloc_index=alloc_index,
        )

    @property
    def peak_index(self) -> int:
        """The first event after which the live bytes are at their highest; -1 for an empty trace."""
        return int(np.argmax(self.live_bytes)) if len(self.live_bytes) else -1

    @property
    def peak_bytes(self) -> int:
        """The highest live requested bytes."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest allocated bytes (see `allocated_bytes`)."""
        return int(self.allocated_bytes.max(initial=0))

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest reserved bytes."""
        return int(self.reserved_bytes.max(initial=0))

    def live_at(self, index: int | None = None) -> LiveBlocks:
        """Who is live after event ``index`` (the peak unless given)."""
        index = self.peak_index if index is None else index
        if not -1 <= index < len(self.trace):
            raise IndexError(f"event {index} of a trace of {len(self.trace)} events")
        before = slice(0, index + 1)
        action, alloc_index = self.trace.action[before], self._alloc_index[before]
        live = action == _ALLOC
        freed = alloc_index[action == _FREE]
        live[freed[freed >= 0]] = False
        return LiveBlocks(index=index, allocs=np.flatnonzero(live), trace=self.trace)

    def peak_by_phase(self) -> dict[str, int]:
        """The highest live bytes after an event of each phase, in the order of `PHASES`."""
        peaks = {
            self.trace.strings[phase]: int(self.live_bytes[self.trace.phase == phase].max())
            for phase in np.unique(self.trace.phase)
        }
        return {name: peaks[name] for name in PHASES if name in peaks}

    def by_category(self, points: int = 1000) -> StackedSeries:
        """Live bytes by category at no more than about ``points`` events, for a stacked picture.

        The events fall into equal runs; of each the one with the most live bytes is kept, and the first and
        the last event, so that the peak is always among them.
        """
        index = self._chosen(points)
        deltas = np.diff(self.live_bytes, prepend=0)
        owner = np.where(self._alloc_index >= 0, self._alloc_index, 0)
        category = self.trace.category[owner]
        series: dict[str, Bytes] = {}
        for name in CATEGORIES:
            if name in self.trace.strings:
                ours = category == self.trace.strings.index(name)
                live = np.cumsum(np.where(ours, deltas, 0))
                if live.any():
                    series[name] = live[index]
        return StackedSeries(index=index, bytes_by_category=series)

    def _chosen(self, points: int) -> npt.NDArray[np.int64]:
        """The events that a picture of ``points`` shows: of each run the highest, and both ends."""
        count = len(self.trace)
        if count <= points:
            return np.arange(count)
        runs = max(1, points - 2)
        starts = np.linspace(0, count, runs, endpoint=False).astype(np.int64)
        run_of = np.searchsorted(starts, np.arange(count), side="right") - 1
        highest = np.maximum.reduceat(self.live_bytes, starts)
        at_highest = np.flatnonzero(self.live_bytes == highest[run_of])
        _, first = np.unique(run_of[at_highest], return_index=True)
        return np.unique(np.concatenate([[0], at_highest[first], [count - 1]]))


def _signs(action: npt.NDArray[Any], more: tuple[int, ...], less: tuple[int, ...]) -> Bytes:
    """+1 where an action adds, -1 where it takes away, else 0."""
    sign_of = np.zeros(len(Action), dtype=np.int64)
    sign_of[list(more)] = 1
    sign_of[list(less)] = -1
    signs: Bytes = sign_of[action]
    return signs
