"""A ring of rows in one file: bounded, safe to read while it is written, whole after a crash.

The file has a head of `HEAD_BYTES` (JSON: columns, capacity; then a hint of the newest row) and
``capacity`` rows. A row is its number, a time, the values, and its number again, as little-endian 8-byte
numbers; row ``n``, counted from 1, lies at place ``(n - 1) % capacity``. A row whose
two numbers differ was being written, and readers leave it out.
Unknown values are NaN; whole numbers are exact up to 2⁵³.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.errors import InputError
from memfit.core.files import write_atomically

HEAD_BYTES = 4096
_HINT = struct.Struct("<Q")
_HINT_AT = HEAD_BYTES - _HINT.size
_MAGIC = "memfit-ring"
_VERSION = 1
_MOST_COLUMNS = 500
_MOST_ROWS = 100_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of a ring, the oldest first.

    Args:
        number: of each row, rising; numbers that were written over are missing.
        time_seconds: of each row.
        values: one array per column.
    """

    number: npt.NDArray[np.int64]
    time_seconds: Floats
    values: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Names of the columns, and how many rows there are place for."""

    columns: tuple[str, ...]
    capacity: int

    @property
    def row(self) -> struct.Struct:
        return struct.Struct(f"<Qd{len(self.columns)}dQ")

    @property
    def dtype(self) -> np.dtype[Any]:
        """A row as numpy sees it."""
        width = len(self.columns)
        return np.dtype([("begin", "<u8"), ("time", "<f8"), ("values", "<f8", (width,)), ("end", "<u8")])

    def head(self) -> bytes:
        text = json.dumps(
            {"format": _MAGIC, "version": _VERSION, "columns": self.columns, "capacity": self.capacity}
        ).encode()
        if len(text) >= _HINT_AT or len(self.columns) > _MOST_COLUMNS:
            raise ValueError("too many columns for the head of a ring")
        return text.ljust(_HINT_AT, b" ") + _HINT.pack(0)

    def place(self, number: int) -> int:
        """Where row ``number`` lies in the file; rows are counted from 1, so that an empty place is none."""
        return HEAD_BYTES + (number - 1) % self.capacity * self.row.size


class RingWriter:
    """Appends rows. One process writes a ring; it goes on where an earlier one ended.

    A ring of other columns or another capacity at that path is begun anew.
    """

    def __init__(self, path: Path, layout: RingLayout) -> None:
        self.layout = layout
        self._row = layout.row
        if _layout_of(path) != layout:
            write_atomically(path, layout.head())
        # Not mapped into memory: on a full disk that would kill the process with a signal.
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        self.number = _newest_number(self._file.fileno(), layout)

    def append(self, time_seconds: float, values: Sequence[float | None]) -> int:
        """Write one row behind the newest; returns its number."""
        self.number += 1
        self.put(time_seconds, values)
        return self.number

    def put(self, time_seconds: float, values: Sequence[float | None]) -> None:
        """Write the newest row again, with other values."""
        plain = (math.nan if value is None else float(value) for value in values)
        self._file.seek(self.layout.place(self.number))
        self._file.write(self._row.pack(self.number, time_seconds, *plain, self.number))
        self._file.seek(_HINT_AT)
        self._file.write(_HINT.pack(self.number))

    def close(self) -> None:
        """Close the file; every row is in it already."""
        self._file.close()


def read_ring(path: Path, *, after: int = 0) -> Rows:
    """The whole rows of a ring with a number above ``after``.

    Raises:
        InputError: no such file, or no ring.
    """
    layout = _layout_of(path)
    if layout is None:
        raise InputError(f"{path} is not a ring that memfit wrote")
    with open(path, "rb", buffering=0) as file:
        rows = _new_rows(file.fileno(), layout, after)
    whole = rows["begin"] == rows["end"]
    rows = rows[whole & (rows["begin"] > after)]
    rows = rows[np.argsort(rows["begin"], kind="stable")]
    values = {name: rows["values"][:, place] for place, name in enumerate(layout.columns)}
    return Rows(number=rows["begin"].astype(np.int64), time_seconds=rows["time"], values=values)


def last_row(path: Path) -> tuple[float, dict[str, float]] | None:
    """Time and values of the newest row; None where there is none yet, or no ring."""
    layout = _layout_of(path)
    if layout is None:
        return None
    with open(path, "rb", buffering=0) as file:
        found = _newest_row(file.fileno(), layout)
    return None if found is None else (found[1], dict(zip(layout.columns, found[2], strict=True)))


def _layout_of(path: Path) -> RingLayout | None:
    try:
        with open(path, "rb") as file:
            head = json.loads(file.read(_HINT_AT))
    except (OSError, ValueError):
        return None
    if not isinstance(head, dict) or (head.get("format"), head.get("version")) != (_MAGIC, _VERSION):
        return None
    columns, capacity = head.get("columns"), head.get("capacity")
    named = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    if not named or not isinstance(capacity, int) or not 0 < capacity <= _MOST_ROWS:
        return None
    return RingLayout(columns=tuple(columns or ()), capacity=capacity)


def _new_rows(descriptor: int, layout: RingLayout, after: int) -> Any:
    """The places that can hold rows above ``after``: all, or those from there to the newest."""
    newest = _hint(descriptor)
    size = layout.row.size
    if after and 0 <= newest - after < layout.capacity:
        first, last = after % layout.capacity, newest % layout.capacity
        spans = [(first, last)] if first <= last else [(first, layout.capacity), (0, last)]
    else:
        spans = [(0, layout.capacity)]
    content = b"".join(
        _read_at(descriptor, HEAD_BYTES + begin * size, (end - begin) * size) for begin, end in spans
    )
    return np.frombuffer(content[: len(content) // size * size], dtype=layout.dtype)


def _newest_row(descriptor: int, layout: RingLayout) -> tuple[int, float, tuple[float, ...]] | None:
    """The newest whole row: the one that the hint names, or those written since."""
    number = _hint(descriptor)
    newest = _row_at(descriptor, layout, number) if number else None
    while (row := _row_at(descriptor, layout, number + 1)) is not None:
        number, newest = number + 1, row
    return newest


def _newest_number(descriptor: int, layout: RingLayout) -> int:
    """The number of the newest whole row among all, whatever the hint says (the power may have failed)."""
    rows = _new_rows(descriptor, layout, 0)
    whole = rows["begin"][rows["begin"] == rows["end"]]
    return int(whole.max()) if len(whole) else 0


def _row_at(descriptor: int, layout: RingLayout, number: int) -> tuple[int, float, tuple[float, ...]] | None:
    row = layout.row
    content = _read_at(descriptor, layout.place(number), row.size)
    if len(content) < row.size:
        return None
    begin, time, *values, end = row.unpack(content)
    return (number, time, tuple(values)) if begin == end == number else None


def _hint(descriptor: int) -> int:
    content = _read_at(descriptor, _HINT_AT, _HINT.size)
    return int(_HINT.unpack(content)[0]) if len(content) == _HINT.size else 0


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Up to ``size`` bytes from ``offset``; fewer where the file ends."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts = []
    while size > 0:
        part = os.read(descriptor, size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
