"""PyTorch's history of allocator events as a trace, and as the steps that led from a start to an end.

A block comes back to the allocator when its free is completed, not when it is asked for: in between it waits
for other streams. So the trace has its FREE there.

A history can have millions of events, each a dictionary: they are let go one by one while columns grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memfit.core.trace import COLUMNS, NO_BLOCK, TEXT_COLUMNS, Action, Trace
from memfit.formats.fields import LARGEST_ADDRESS, LARGEST_SIZE, Streams, member, shown, whole
from memfit.formats.packed_events import PackedEvents
from memfit.formats.places import Places

REQUESTED = -1
"""The action of a free that is asked for and not done yet."""

ACTIONS: Mapping[str, int] = {
    "alloc": int(Action.ALLOC),
    "free_completed": int(Action.FREE),
    "free": int(Action.FREE),
    "segment_alloc": int(Action.SEGMENT_ALLOC),
    "segment_free": int(Action.SEGMENT_FREE),
    "segment_map": int(Action.SEGMENT_MAP),
    "segment_unmap": int(Action.SEGMENT_UNMAP),
    "oom": int(Action.OOM),
    "free_requested": REQUESTED,
}
_ALLOC, _FREE, _OOM = int(Action.ALLOC), int(Action.FREE), int(Action.OOM)


class Step(NamedTuple):
    """One event; ``action`` is an `Action` or `REQUESTED`."""

    action: int
    address: int
    size_bytes: int
    stream: int


class Steps:
    """The events of a history in order, as columns."""

    def __init__(self) -> None:
        self.actions, self.addresses = array("b"), array("Q")
        self.sizes, self.streams = array("q"), array("i")
        self._appends = (
            self.actions.append, self.addresses.append, self.sizes.append, self.streams.append,
        )  # fmt: skip

    def append(self, action: int, address: int, size: int, stream: int) -> None:
        """Put one at the end."""
        to_actions, to_addresses, to_sizes, to_streams = self._appends
        to_actions(action)
        to_addresses(address)
        to_sizes(size)
        to_streams(stream)

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Step]:
        return map(Step, self.actions, self.addresses, self.sizes, self.streams)

    def __reversed__(self) -> Iterator[Step]:
        columns = (self.actions, self.addresses, self.sizes, self.streams)
        return map(Step, *(reversed(column) for column in columns))


@dataclass(frozen=True, kw_only=True)
class History:
    """A history that was read.

    Attributes:
        trace: the events, blocks paired.
        steps: the same events and the asked-for frees, for going back.
        free_at_oom: index of the first out-of-memory step, and what the device had free then.
        notes: what had to be assumed.
    """

    trace: Trace
    steps: Steps
    free_at_oom: tuple[int, int] | None
    notes: tuple[str, ...]


def read_history(
    events: list[Any] | PackedEvents, *, place: str, streams: Streams, places: Places
) -> History:
    """Read the events of one device. The list is used up: each event is let go once it is read.

    Raises:
        InputError: an event that is none, by its number.
    """
    return _Reader(place, streams, places).read(events)


class _Reader:
    def __init__(self, place: str, streams: Streams, places: Places) -> None:
        self._place, self._streams, self._places = place, streams, places
        self._steps = Steps()
        self._rows = _Rows()
        self._live: dict[int, int] = {}
        self._lost = 0
        self._free_at_oom: tuple[int, int] | None = None

    def read(self, events: list[Any] | PackedEvents) -> History:
        for index, event in enumerate(events):
            if type(events) is list:
                events[index] = None
            self._event(event, index)
        notes = (
            f"{self._lost} frees are missing in the history; they are taken to be where the memory is used "
            "again.",
        )
        return History(
            trace=self._rows.trace(),
            steps=self._steps,
            free_at_oom=self._free_at_oom,
            notes=notes if self._lost else (),
        )

    def _event(self, event: Any, index: int) -> None:
        """Take one event in; one that changes nothing (a snapshot, one of a newer version) is left out."""
        name = event["action"] if type(event) is dict and "action" in event else self._action(event, index)
        action = ACTIONS.get(name) if isinstance(name, str) else None
        if action is None:
            return
        address, size = event.get("addr", event.get("device_free", 0)), event.get("size")
        stream = event.get("stream", 0)
        usual = type(address) is type(size) is type(stream) is int
        if not (usual and 0 <= address <= LARGEST_ADDRESS and 0 <= size <= LARGEST_SIZE and stream >= 0):
            place = f"{self._place}[{index}]"
            address = whole(address, f"{place}: addr", most=LARGEST_ADDRESS)
            size = whole(member(event, "size", place), f"{place}: size")
            stream = whole(stream, f"{place}: stream", most=LARGEST_ADDRESS)
        pool = event.get("pool_id")
        number = self._streams.number(stream, _private(pool) if pool else None)
        self._steps.append(action, address, size, number)
        if action == REQUESTED:
            return
        frames = event.get("frames") if action != _FREE else None
        self._row(action, address, size, number, self._rows.text(self._places.of(frames)) if frames else 0)

    def _action(self, event: Any, index: int) -> Any:
        return member(event, "action", f"{self._place}[{index}]")

    def _row(self, action: int, address: int, size: int, stream: int, where: int) -> None:
        rows, live = self._rows, self._live
        if action == _ALLOC:
            if address in live:  # its free is missing, as where a history was switched off for a while
                rows.append(_FREE, live.pop(address), size, stream, address, 0)
                self._lost += 1
            live[address] = rows.blocks
            rows.append(_ALLOC, rows.blocks, size, stream, address, where)
            rows.blocks += 1
        elif action == _FREE:
            rows.append(_FREE, live.pop(address, NO_BLOCK), size, stream, address, 0)
        elif action == _OOM:  # its address is what the device had free
            if self._free_at_oom is None:
                self._free_at_oom = (len(self._steps) - 1, address)
            rows.append(_OOM, NO_BLOCK, size, stream, 0, where)
        else:
            rows.append(action, NO_BLOCK, size, stream, address, where)


class _Rows:
    """The columns of a trace that grow, without those that a history has nothing for."""

    _CODES: Mapping[str, str] = {
        "action": "B", "block": "q", "size_bytes": "q", "stream": "i", "address": "Q", "where": "i",
    }  # fmt: skip

    def __init__(self) -> None:
        self.blocks = 0
        self._columns = [array(code) for code in self._CODES.values()]
        self._appends = tuple(column.append for column in self._columns)
        self._texts: dict[str, int] = {"": 0, "other": 1}

    def text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts)) if text else 0

    def append(self, action: int, block: int, size: int, stream: int, address: int, where: int) -> None:
        to_actions, to_blocks, to_sizes, to_streams, to_addresses, to_places = self._appends
        to_actions(action)
        to_blocks(block)
        to_sizes(size)
        to_streams(stream)
        to_addresses(address)
        to_places(where)

    def trace(self) -> Trace:
        names = zip(self._CODES, self._columns, strict=True)
        columns = {name: np.array(column, dtype=COLUMNS[name]) for name, column in names}
        count = len(columns["action"])
        for name in TEXT_COLUMNS:
            other = int(name in ("category", "phase"))
            columns.setdefault(name, np.full(count, other, dtype=COLUMNS[name]))
        return Trace(**columns, strings=tuple(self._texts), meta={"source": "memory-snapshot"})


def _private(pool: Any) -> tuple[Any, ...] | None:
    """The id of a private pool; ``None`` for the common one, ``(0, 0)``."""
    if not isinstance(pool, tuple | list) or not any(pool):
        return None
    parts = tuple(pool[:2])
    return parts if all(isinstance(part, int) for part in parts) else (shown(pool),)
