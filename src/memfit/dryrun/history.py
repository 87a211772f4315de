"""PyTorch's own history of allocator events, made into a `Trace`: blocks paired, with phases, owners and
places.

Pure data: it runs without torch and without a GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memfit.core.trace import PHASES, Action, Trace, TraceBuilder

SEPARATOR = " | "
"""Between phase, operation and module in the text that `labels` stamps on each event."""

WORKSPACE_BYTES = frozenset({8_519_680, 33_554_432, 4_194_304})
"""What PyTorch gives a cuBLAS handle: before Hopper, on Hopper, since Blackwell consumer cards (and ROCm's
default)."""

_ACTIONS = {
    "alloc": Action.ALLOC,
    "free_completed": Action.FREE,
    "segment_alloc": Action.SEGMENT_ALLOC,
    "segment_free": Action.SEGMENT_FREE,
    "segment_map": Action.SEGMENT_MAP,
    "segment_unmap": Action.SEGMENT_UNMAP,
    "oom": Action.OOM,
}
_OWNERS = ("parameter", "optimizer_state", "gradient", "buffer", "input")
"""Who has a block that several were seen to own: the first of these."""
_MULTIPLIES = ("mm", "linear", "matmul", "addmv", "dot", "mv", "baddbmm")


class Position(NamedTuple):
    """A point in the history: how many blocks had been allocated, and how many given back, by then."""

    allocs: int = 0
    frees: int = 0


@dataclass(frozen=True, kw_only=True)
class Mark:
    """At ``position`` the memory at ``address`` of a device belonged to ``category``."""

    position: Position
    address: int
    category: str
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class PhaseChange:
    """From ``position`` on, the main thread was in ``phase``."""

    position: Position
    phase: str


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What was noted beside one device's history while it was recorded, each list in the order of time.

    Args:
        start: where the recorded events begin; not 0 where old events were dropped.
        marks: who was seen owning what.
        phases: when the main thread went from one phase to another.
        step_ends: when the optimizer steps ended.
    """

    start: Position = Position()
    marks: Sequence[Mark] = ()
    phases: Sequence[PhaseChange] = ()
    step_ends: Sequence[Position] = ()


@dataclass(frozen=True, kw_only=True)
class History:
    """A trace, and what can be said of its peak.

    Args:
        trace: all events.
        step_ends: index of the first event after each optimizer step.
    """

    trace: Trace
    step_ends: tuple[int, ...]

    def live_bytes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Requested bytes alive after each event."""
        trace = self.trace
        sign = np.where(
            trace.action == Action.ALLOC,
            1,
            np.where((trace.action == Action.FREE) & (trace.block >= 0), -1, 0),
        )
        return np.cumsum(sign * trace.size_bytes)

    def at_peak(self, column: str) -> dict[str, int]:
        """Requested bytes alive at the peak, by the text of a column, largest first."""
        trace, live = self.trace, self.live_bytes()
        if not len(live) or not live.max():
            return {}
        peak = int(live.argmax())
        freed = trace.block[: peak + 1][trace.action[: peak + 1] == Action.FREE]
        born = np.flatnonzero(trace.action[: peak + 1] == Action.ALLOC)
        alive = born[~np.isin(trace.block[born], freed)]
        totals = np.zeros(len(trace.strings), dtype=np.int64)
        np.add.at(totals, getattr(trace, column)[alive], trace.size_bytes[alive])
        named = {trace.strings[index]: int(totals[index]) for index in np.flatnonzero(totals)}
        return dict(sorted(named.items(), key=lambda item: -item[1]))

    def step_peaks(self) -> tuple[int, ...]:
        """Peak requested bytes of each whole step."""
        live = self.live_bytes()
        starts = (0, *self.step_ends)
        spans = zip(starts, self.step_ends, strict=False)
        return tuple(int(live[begin:end].max()) if end > begin else 0 for begin, end in spans)


@dataclass
class _Block:
    number: int
    size_bytes: int
    born: int  # allocs and frees before it
    phase: str
    op: str
    module: str
    where: str
    owner: str | None = None
    freed: int | None = None  # allocs and frees up to its end


def read_history(
    events: Sequence[Mapping[str, Any]],
    observed: Observations,
    *,
    is_user_file: Callable[[str], bool],
    meta: Mapping[str, Any],
) -> History:
    """One device's events (``snapshot["device_traces"][0]``) as a trace.

    Args:
        events: as PyTorch gives them.
        observed: what was noted beside them.
        is_user_file: tells the user's own code from libraries, by file name.
        meta: what the trace is of; ``step_ends``, the first event after each optimizer step, is added.
    """
    reader = _Reader(observed, is_user_file)
    rows = [row for event in events if (row := reader.read(event)) is not None]
    reader.settle_marks(None)
    backwards = [sum(change.position) for change in observed.phases if change.phase == "backward"]
    builder = TraceBuilder(meta=meta)
    for action, block, columns in rows:
        if block is None:
            builder.append(action, **columns)
        else:
            builder.append(
                action,
                block=block.number,
                size_bytes=block.size_bytes,
                category=_category(block, backwards),
                phase=block.phase,
                op=block.op,
                module=block.module,
                where=block.where,
                **columns,
            )
    builder.meta["step_ends"] = list(reader.step_ends)
    return History(trace=builder.build(), step_ends=tuple(reader.step_ends))


class _Reader:
    """Pairs allocations with frees, event by event, and finds the block that each mark meant."""

    def __init__(self, observed: Observations, is_user_file: Callable[[str], bool]) -> None:
        self._observed = observed
        self._is_user_file = is_user_file
        self._allocs, self._frees = observed.start
        self._live: dict[int, _Block] = {}
        self._next_mark = 0
        self._count = 0
        self._rows = 0
        self._streams: dict[int, int] = {0: 0}
        self._places: dict[tuple[str, int, str], str] = {}
        self._phase_starts = [tuple(change.position) for change in observed.phases]
        self.step_ends: list[int] = []

    def read(self, event: Mapping[str, Any]) -> tuple[Action, _Block | None, dict[str, Any]] | None:
        name = event["action"]
        if name != "free_completed":  # which follows its free_requested: a mark lies before or after both
            self.settle_marks(Position(self._allocs, self._frees))
        if name == "free_requested":
            self._frees += 1
        action = _ACTIONS.get(name)
        if action is None:
            return None
        self._rows += 1
        address = int(event.get("addr", 0))
        columns = {"stream": self._stream(event), "address": address}
        block = None
        if action is Action.ALLOC:
            block = self._live[address] = self._born(event)
        elif action is Action.FREE:
            block = self._live.pop(address, None)
            if block is not None:
                block.freed = self._allocs + self._frees
        if block is None:
            columns |= {"size_bytes": int(event["size"])}
        return action, block, columns

    def settle_marks(self, now: Position | None) -> None:
        """Settle what was noted up to ``now`` (None: everything that is left)."""
        marks, ends = self._observed.marks, self._observed.step_ends
        while self._next_mark < len(marks) and _reached(marks[self._next_mark].position, now):
            mark = marks[self._next_mark]
            block = self._live.get(mark.address)
            if block is not None and (block.owner is None or _rank(mark.category) < _rank(block.owner)):
                block.owner = mark.category
            self._next_mark += 1
        while len(self.step_ends) < len(ends) and _reached(ends[len(self.step_ends)], now):
            self.step_ends.append(self._rows)

    def _born(self, event: Mapping[str, Any]) -> _Block:
        phase, op, module = self._label(event)
        block = _Block(
            number=self._count,
            size_bytes=int(event["size"]),
            born=self._allocs + self._frees,
            phase=phase,
            op=op,
            module=module,
            where=self._where(event.get("frames") or ()),
        )
        self._count += 1
        self._allocs += 1
        return block

    def _label(self, event: Mapping[str, Any]) -> tuple[str, str, str]:
        parts = str(event.get("user_metadata", "")).split(SEPARATOR)
        if len(parts) == 3 and parts[0] in PHASES:
            return parts[0], parts[1], parts[2]
        index = bisect.bisect_right(self._phase_starts, (self._allocs, self._frees)) - 1
        return (self._observed.phases[index].phase if index >= 0 else "init"), "", ""

    def _where(self, frames: Iterable[Mapping[str, Any]]) -> str:
        """The innermost frame of the user's own code; PyTorch lists frames from the innermost out."""
        for frame in frames:
            key = (frame["filename"], frame["line"], frame["name"])
            text = self._places.get(key)
            if text is None:
                text = f"{key[0]}:{key[1]} {key[2]}" if self._is_user_file(key[0]) else ""
                self._places[key] = text
            if text:
                return text
        return ""

    def _stream(self, event: Mapping[str, Any]) -> int:
        return self._streams.setdefault(int(event.get("stream", 0)), len(self._streams))


def _reached(position: Position, now: Position | None) -> bool:
    return now is None or (position.allocs <= now.allocs and position.frees <= now.frees)


def _rank(category: str) -> int:
    return _OWNERS.index(category) if category in _OWNERS else len(_OWNERS)


def _category(block: _Block, backwards: Sequence[int]) -> str:
    """Whose a block is: its owner's if one was seen, else what its life says."""
    if block.owner is not None:
        return block.owner
    if block.freed is None and block.size_bytes in WORKSPACE_BYTES and block.op.endswith(_MULTIPLIES):
        return "workspace"
    if block.phase == "init":
        return "other"
    if block.phase not in ("forward", "recompute"):
        return "temporary"
    if not backwards or block.phase == "recompute":
        return "activation"
    following = bisect.bisect_right(backwards, block.born)
    kept = following < len(backwards) and (block.freed is None or block.freed > backwards[following])
    return "activation" if kept else "temporary"
