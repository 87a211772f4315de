"""The CSV log of RAPIDS' memory manager (``rmm.enable_logging``)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.trace import Action
from memfit.formats.content import Content
from memfit.formats.fields import LARGEST_ADDRESS, LARGEST_SIZE, Streams, shown
from memfit.formats.pairing import LogEvent, pair

KIND = "rmm-log"
NEEDED = ("action", "pointer", "size", "stream")


def looks_like(head: bytes) -> bool:
    """Whether the first line has the log's columns."""
    first = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("latin-1").lower()
    return set(NEEDED) <= {name.strip() for name in first.split(",")}


def read(content: Content) -> Recording:
    """Read a log.

    Raises:
        InputError: a row that is no event, by its number.
    """
    paired = pair(_events(content), kind=KIND)
    notes = []
    if paired.before_count:
        notes.append(
            f"{paired.before_count} blocks were there before the log began; their place is not known"
        )
    return Recording(trace=paired.trace, kind=KIND, notes=tuple(notes))


def _events(content: Content) -> Iterator[LogEvent]:
    lines = content.text().splitlines()
    try:
        rows = csv.reader(lines)
        columns = [name.strip().lower() for name in next(rows)]
        places = [columns.index(name) for name in NEEDED]
        streams = Streams()
        for row in rows:
            if row:
                yield _event(row, places, streams, f"{content.name}:{rows.line_num}")
    except csv.Error as error:
        raise InputError(f"{content.name}:{rows.line_num}: not a row of a log ({error})") from error


def _event(row: list[str], places: list[int], streams: Streams, place: str) -> LogEvent:
    if len(row) <= max(places):
        raise InputError(f"{place}: a row of {len(row)} columns; at least {max(places) + 1} are needed")
    action, pointer, size, stream = (row[at].strip() for at in places)
    number = streams.number(_number(stream, f"{place}: stream", LARGEST_ADDRESS))
    address = 0 if pointer in ("", "(nil)") else _number(pointer, f"{place}: pointer", LARGEST_ADDRESS)
    count = _number(size, f"{place}: size", LARGEST_SIZE)
    kind = action.lower()
    if kind.startswith("alloc"):
        return LogEvent(Action.OOM if "fail" in kind else Action.ALLOC, count, address, number)
    if kind in ("free", "deallocate", "dealloc"):
        return LogEvent(Action.FREE, count, address, number)
    raise InputError(f"{place}: unknown action {shown(action)}; it is allocate, free or allocate failure")


def _number(text: str, place: str, most: int) -> int:
    try:
        value: Any = int(text, 16) if text.lower().startswith("0x") else int(text or "0")
    except ValueError:
        try:
            value = int(text, 16)  # pointers are written without 0x on some platforms
        except ValueError:
            raise InputError(f"{place} is {shown(text)}, not a number") from None
    if not 0 <= value <= most:
        raise InputError(f"{place} is {shown(text)}, which is out of range")
    return int(value)
