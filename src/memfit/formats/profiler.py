"""Memory events of torch.profiler (``profile_memory=True``), from its Chrome trace or as a table.

The profiler records blocks, whose sizes are rounded already, and the totals after each event. What was
allocated before it started is known by its total only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.trace import Action
from memfit.formats.fields import LARGEST_ADDRESS, LARGEST_SIZE, member, shown, whole
from memfit.formats.pairing import LogEvent, Paired, pair

KIND = "profiler-trace"
CPU, CUDA = 0, 1


class MemoryEvent(NamedTuple):
    """One event: ``change_bytes`` above zero for an allocation. Totals are -1 where they are not told."""

    time: float
    change_bytes: int
    address: int
    allocated_bytes: int
    reserved_bytes: int
    device: tuple[int, int]


def read_events(rows: Iterable[Any], name: str) -> Recording:
    """A bare array of trace events.

    Raises:
        InputError: none of them is about memory, or one is malformed.
    """
    return recording(memory_events(rows, name), name)


def memory_events(rows: Iterable[Any], name: str) -> list[MemoryEvent]:
    """The memory events among all events of a trace."""
    events = []
    for index, row in enumerate(rows):
        if isinstance(row, dict) and row.get("name") == "[memory]":
            events.append(_event(row, f"{name}: traceEvents[{index}]"))
    return events


def _event(row: dict[str, Any], place: str) -> MemoryEvent:
    values = member(row, "args", place)
    return MemoryEvent(
        time=_time(row.get("ts"), place),
        change_bytes=whole(member(values, "Bytes", place), f"{place}: Bytes", least=-LARGEST_SIZE),
        address=whole(values.get("Addr", 0), f"{place}: Addr", most=LARGEST_ADDRESS),
        allocated_bytes=_total(values.get("Total Allocated"), f"{place}: Total Allocated"),
        reserved_bytes=_total(values.get("Total Reserved"), f"{place}: Total Reserved"),
        device=(
            whole(values.get("Device Type", CUDA), f"{place}: Device Type"),
            whole(values.get("Device Id", 0), f"{place}: Device Id", least=-1),
        ),
    )


def from_table(rows: Iterable[dict[str, Any]], name: str) -> Recording:
    """Events of one device as rows with ``bytes`` and, where known, ``ts_us``, ``addr``, the two totals."""
    events = []
    for index, row in enumerate(rows):
        place = f"{name}: events[{index}]"
        events.append(
            MemoryEvent(
                time=_time(row.get("ts_us", index), place),
                change_bytes=whole(member(row, "bytes", place), f"{place}: bytes", least=-LARGEST_SIZE),
                address=whole(row.get("addr", 0), f"{place}: addr", most=LARGEST_ADDRESS),
                allocated_bytes=_total(row.get("total_allocated"), f"{place}: total_allocated"),
                reserved_bytes=_total(row.get("total_reserved"), f"{place}: total_reserved"),
                device=(CUDA, 0),
            )
        )
    return recording(events, name)


def _time(value: Any, place: str) -> float:
    if isinstance(value, str):  # some versions write times as text
        try:
            value = float(value)
        except ValueError:
            value = None
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise InputError(f"{place}: ts is {shown(value)}, not a time")
    return float(value)


def _total(value: Any, place: str) -> int:
    return -1 if value is None else whole(value, place)


def recording(events: list[MemoryEvent], name: str) -> Recording:
    """The recording of the busiest GPU among the events.

    Raises:
        InputError: there are no memory events.
    """
    if not events:
        raise InputError(
            f"{name} has no memory events; record it with torch.profiler.profile(profile_memory=True)"
        )
    notes = ["The sizes are those of blocks: a profiler does not record what was asked for."]
    own = sorted(_one_device(events, notes), key=lambda event: event.time)
    paired = pair(map(_log_event, own), kind=KIND)
    if any(event.address == 0 for event in own):
        notes.append("Without addresses, a free was taken for the youngest block of its size.")
    held = 0
    if own[0].allocated_bytes >= 0:
        held = max(own[0].allocated_bytes - own[0].change_bytes - paired.before_bytes, 0)
        notes.append(f"{held} bytes were allocated before the profiler started; their place is not known.")
    return Recording(
        trace=paired.trace,
        held_bytes=held,
        allocated_bytes=_totals([event.allocated_bytes for event in own], paired),
        reserved_bytes=_totals([event.reserved_bytes for event in own], paired),
        kind=KIND,
        notes=tuple(notes),
    )


def _log_event(event: MemoryEvent) -> LogEvent:
    action = Action.ALLOC if event.change_bytes >= 0 else Action.FREE
    return LogEvent(action, abs(event.change_bytes), event.address)


def _one_device(events: list[MemoryEvent], notes: list[str]) -> list[MemoryEvent]:
    counts = Counter(event.device for event in events)
    gpus = {device: count for device, count in counts.items() if device[0] != CPU} or counts
    chosen = max(gpus, key=lambda device: (gpus[device], device))
    if len(counts) > 1:
        others = sum(counts.values()) - counts[chosen]
        kind = "the CPU" if chosen[0] == CPU else f"GPU {chosen[1]}"
        notes.append(f"Only the events of {kind} are read; {others} events of other devices are left out.")
    return [event for event in events if event.device == chosen]


def _totals(values: list[int], paired: Paired) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """Totals after each event of the trace; those put in front have the first level."""
    if min(values) < 0:
        return None
    return np.array([values[0]] * paired.before_count + values, dtype=np.int64)
