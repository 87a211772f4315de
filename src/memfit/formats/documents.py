"""JSON documents: traces of torch.profiler (Chrome format), memory snapshots as JSON, tables of events.

A profiler's trace holds millions of events of which few are about memory, so a document is read event by
event and only what is needed is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.formats import profiler, snapshots
from memfit.formats.content import Content
from memfit.formats.fields import listed, shown

KEPT = ("segments", "device_traces", "allocator_settings", "events", "event_fields", "fields")
_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


def looks_like(head: bytes) -> bool:
    """Whether it begins as an object or an array."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def read(content: Content) -> Recording:
    """Read a JSON document by what is in it.

    Raises:
        InputError: broken JSON, or nothing about memory in it.
    """
    cursor = _Cursor(content.text(), content.name)
    if cursor.opens("["):
        first, rows = _peeked(cursor.items())
        if isinstance(first, dict) and "ph" in first:
            return profiler.read_events(rows, content.name)
        return snapshots.from_value(list(rows), name=content.name, size_bytes=content.size_bytes)
    kept: dict[str, Any] = {}
    events: list[profiler.MemoryEvent] | None = None
    for key in cursor.members():
        if key == "traceEvents" and cursor.opens("["):
            events = profiler.memory_events(cursor.items(), content.name)
        elif key in KEPT:
            kept[key] = cursor.value()
    if events is not None:
        return profiler.recording(events, content.name)
    if "segments" in kept or "device_traces" in kept:
        return snapshots.from_value(_with_rows(kept), name=content.name, size_bytes=content.size_bytes)
    if "events" in kept and ("fields" in kept or "event_fields" in kept):
        return profiler.from_table(_rows(kept), content.name)
    raise InputError(
        f"{content.name} is JSON without memory events: neither traceEvents, nor segments or device_traces"
    )


def _with_rows(kept: dict[str, Any]) -> dict[str, Any]:
    """A snapshot whose events are a table gets them as PyTorch writes them."""
    if "device_traces" in kept or "events" not in kept:
        return kept
    return {**kept, "device_traces": [_rows(kept)]}


def _rows(kept: dict[str, Any]) -> list[Any]:
    """Rows of a table of events as dictionaries."""
    names = listed(kept.get("event_fields", kept.get("fields")), "fields")
    rows = []
    for index, row in enumerate(listed(kept["events"], "events")):
        if not isinstance(row, list) or len(row) != len(names):
            raise InputError(f"events[{index}] is {shown(row)}, not a list of {len(names)}")
        rows.append({str(name): value for name, value in zip(names, row, strict=True)})
    return rows


def _peeked(items: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    for first in items:
        return first, _chained(first, items)
    return None, iter(())


def _chained(first: Any, items: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from items


class _Cursor:
    """A place in a JSON text, moved from value to value."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._at = _BLANK.match(text).end()  # type: ignore[union-attr]  # it matches nothing, too
        self._decode = json.JSONDecoder().raw_decode

    def opens(self, bracket: str) -> bool:
        return self._text.startswith(bracket, self._at)

    def value(self) -> Any:
        """The value here; the cursor goes behind it."""
        try:
            value, self._at = self._decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{self._name} is broken JSON at line {error.lineno}, column {error.colno}: {error.msg}"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
            raise InputError(f"{self._name} is JSON that cannot be read near character {self._at}") from error
        return value

    def items(self) -> Iterator[Any]:
        """The values of the array here, one by one."""
        self._at += 1
        while self._continues("]"):
            yield self.value()

    def members(self) -> Iterator[str]:
        """The keys of the object here; a value that the caller does not read is stepped over."""
        self._at += 1
        while self._continues("}"):
            key = self.value()
            colon = re.compile(r"[ \t\r\n]*:[ \t\r\n]*").match(self._text, self._at)
            if colon is None or not isinstance(key, str):
                raise InputError(f"{self._name} is broken JSON near character {self._at}: no key and colon")
            before = self._at = colon.end()
            yield key
            if self._at == before:
                self.value()

    def _continues(self, closing: str) -> bool:
        self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self.opens(closing):
            self._at += 1
            return False
        if self._at >= len(self._text):
            raise InputError(f"{self._name} ends in the middle, at character {self._at}")
        return True
