"""PyTorch's history of allocator events as a trace, and as the steps that led from a start to an end.

A block comes back to the allocator when its free is completed, not when it is asked for: in between it waits
for other streams. So the trace has its FREE there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memfit.core.trace import NO_BLOCK, Action, Trace, TraceBuilder
from memfit.formats.fields import LARGEST_ADDRESS, Streams, member, shown, whole
from memfit.formats.places import Places

ACTIONS: Mapping[str, Action] = {
    "alloc": Action.ALLOC,
    "free_completed": Action.FREE,
    "free": Action.FREE,
    "segment_alloc": Action.SEGMENT_ALLOC,
    "segment_free": Action.SEGMENT_FREE,
    "segment_map": Action.SEGMENT_MAP,
    "segment_unmap": Action.SEGMENT_UNMAP,
    "oom": Action.OOM,
}
REQUESTED = "free_requested"


class Step(NamedTuple):
    """One event; ``action`` is ``None`` for a free that is asked for and not done yet."""

    action: Action | None
    address: int
    size_bytes: int
    stream: int
    where: str


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
    steps: Sequence[Step]
    free_at_oom: tuple[int, int] | None
    notes: tuple[str, ...]


def read_history(events: Sequence[Any], *, place: str, streams: Streams, places: Places) -> History:
    """Read the events of one device.

    Raises:
        InputError: an event that is none, by its number.
    """
    builder = TraceBuilder(meta={"source": "memory-snapshot"})
    steps: list[Step] = []
    live: dict[int, int] = {}
    lost = 0
    free_at_oom: tuple[int, int] | None = None
    for index, event in enumerate(events):
        step = _step(event, f"{place}[{index}]", streams, places)
        if step is None:
            continue
        steps.append(step)
        action, address, size, stream, where = step
        if action is Action.ALLOC:
            if address in live:  # its free is missing, as where a history was switched off for a while
                builder.free(live[address], address=address, stream=stream)
                lost += 1
            live[address] = builder.alloc(size, address=address, stream=stream, where=where)
        elif action is Action.FREE:
            block = live.pop(address, NO_BLOCK)
            builder.append(Action.FREE, block=block, size_bytes=size, address=address, stream=stream)
        elif action is not None:
            if action is Action.OOM and free_at_oom is None:
                free_at_oom = (len(steps) - 1, address)
            at = 0 if action is Action.OOM else address
            builder.append(action, size_bytes=size, address=at, stream=stream, where=where)
    notes = (f"{lost} frees are missing in the history; they are taken to be where the block is used again.",)
    return History(trace=builder.build(), steps=steps, free_at_oom=free_at_oom, notes=notes if lost else ())


def _step(event: Any, place: str, streams: Streams, places: Places) -> Step | None:
    """The step of an event, or ``None`` for one that changes nothing (a snapshot, one of a newer version)."""
    name = member(event, "action", place)
    if not isinstance(name, str) or (name not in ACTIONS and name != REQUESTED):
        return None
    address = event.get("addr", event.get("device_free", 0))  # of an oom: what the device had free
    return Step(
        ACTIONS.get(name),
        whole(address, f"{place}: addr", most=LARGEST_ADDRESS),
        whole(member(event, "size", place), f"{place}: size"),
        _stream(event, place, streams),
        places.of(event.get("frames")),
    )


def _stream(event: Mapping[str, Any], place: str, streams: Streams) -> int:
    pool = event.get("pool_id")
    private = pool if isinstance(pool, tuple | list) and any(pool) else None
    if private is not None and not all(isinstance(part, int) for part in private):
        private = (shown(private),)
    handle = whole(event.get("stream", 0), f"{place}: stream", most=LARGEST_ADDRESS)
    return streams.number(handle, None if private is None else tuple(private[:2]))
