"""JSON lines, one operation a line, as programs and tests write them.

{"op": "config", "total_bytes": 8589934592, "fraction": 0.6}     optional, first
{"op": "alloc", "id": 1, "size": 4096, "stream": 0}
{"op": "free", "id": 1}
{"op": "record_stream", "id": 1, "stream": 2}
{"op": "empty_cache"}    {"op": "sync"}    {"op": "reset_peak"}
{"op": "alloc", "id": 2, "size": 4096, "pool": 1}    {"op": "release_pool", "pool": 1}    in a private pool
"""

from __future__ import annotations

import json
import re
from typing import Any

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.trace import NO_BLOCK, Action, TraceBuilder
from memfit.formats.content import Content
from memfit.formats.fields import LARGEST_SIZE, member, whole

KIND = "json-lines"
LARGEST_STREAM = (1 << 31) - 1
FIRST_PRIVATE_STREAM = 1 << 19
"""Where the numbers begin that stand for a private pool on a stream."""
ACTIONS = {
    "alloc": Action.ALLOC,
    "free": Action.FREE,
    "record_stream": Action.RECORD_STREAM,
    "sync": Action.SYNC,
    "empty_cache": Action.EMPTY_CACHE,
    "reset_peak": Action.RESET_PEAK,
    "release_pool": Action.RELEASE_POOL,
}
_FIRST_LINE = re.compile(rb'\s*\{[^\n]*"op"\s*:')


def looks_like(head: bytes) -> bool:
    """Whether the first line is an operation."""
    return _FIRST_LINE.match(head.removeprefix(b"\xef\xbb\xbf")) is not None


def read(content: Content) -> Recording:
    """Read a file of JSON lines. Event numbers count the operations, without the config line.

    Raises:
        InputError: a line that is not an operation, by its number.
    """
    reader = _Reader()
    for number, line in enumerate(content.lines(), 1):
        if line.strip():
            reader.read(line, f"{content.name}:{number}")
    return reader.recording()


class _Reader:
    def __init__(self) -> None:
        self._builder = TraceBuilder(meta={"source": KIND})
        self._live: dict[Any, int] = {}
        self._private: dict[tuple[int, int], int] = {}
        self._total_bytes: int | None = None
        self._fraction: float | None = None
        self._began = False

    def read(self, line: str, place: str) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deep"
            raise InputError(f"{place}: not an operation ({reason}): {line.strip()[:80]}") from error
        op = member(entry, "op", place)
        if op == "config":
            self._config(entry, place)
        elif isinstance(op, str) and op in ACTIONS:
            self._operation(ACTIONS[op], entry, place)
        else:
            raise InputError(f"{place}: unknown op {str(op)[:40]!r}; it is one of {', '.join(ACTIONS)}")
        self._began = True

    def _config(self, entry: dict[str, Any], place: str) -> None:
        if self._began:
            raise InputError(f"{place}: config must be the first line")
        if entry.get("total_bytes") is not None:
            self._total_bytes = whole(entry["total_bytes"], f"{place}: total_bytes", least=1)
        fraction = entry.get("fraction")
        if fraction is not None:
            if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
                raise InputError(f"{place}: fraction is {str(fraction)[:40]}, not a number from 0 to 1")
            self._fraction = float(fraction)

    def _operation(self, action: Action, entry: dict[str, Any], place: str) -> None:
        builder = self._builder
        if action is Action.RELEASE_POOL:
            member(entry, "pool", place)
            builder.append(action, stream=self._in_pool(entry, 0, place))
            return
        if action not in (Action.ALLOC, Action.FREE, Action.RECORD_STREAM):
            builder.append(action)
            return
        name = whole(member(entry, "id", place), f"{place}: id", least=-LARGEST_SIZE)
        stream = whole(entry.get("stream", 0), f"{place}: stream", most=LARGEST_STREAM)
        if action is Action.ALLOC:
            size = whole(member(entry, "size", place), f"{place}: size")
            self._live[name] = builder.alloc(size, stream=self._in_pool(entry, stream, place))
        elif action is Action.FREE:
            builder.free(self._live.pop(name, NO_BLOCK), stream=stream)
        else:
            member(entry, "stream", place)
            builder.append(action, block=self._live.get(name, NO_BLOCK), stream=stream)

    def _in_pool(self, entry: dict[str, Any], stream: int, place: str) -> int:
        """The number that stands for the entry's private pool on a stream; without one, the stream's."""
        pool = whole(entry.get("pool", 0), f"{place}: pool", most=LARGEST_STREAM)
        if pool == 0:
            return stream
        return self._private.setdefault((stream, pool), FIRST_PRIVATE_STREAM + len(self._private))

    def recording(self) -> Recording:
        return Recording(
            trace=self._builder.build(),
            total_bytes=self._total_bytes,
            memory_fraction=self._fraction,
            kind=KIND,
            private_streams={number: lane for lane, number in self._private.items()},
        )
