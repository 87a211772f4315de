"""A trace: every allocation event of a run, in order, as columns.

One type that the dry run, the capture, the readers of foreign files and the simulated allocators all write
and read. An event is one row over `COLUMNS`; a million of them take about 50 MB. Texts (module names,
operators, places) are interned: their columns hold indices into `Trace.strings`.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from memfit.core.errors import InputError
from memfit.core.files import write_atomically

SCHEMA = "memfit-trace"
SCHEMA_VERSION = 1

Category = Literal[
    "parameter",
    "gradient",
    "optimizer_state",
    "buffer",
    "input",
    "activation",
    "temporary",
    "workspace",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Phase = Literal["init", "forward", "backward", "recompute", "optimizer", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)

NO_BLOCK = -1
"""The block of an event that has none: segments, out of memory, a free of what was there before the trace."""


class Action(IntEnum):
    """What an event does. Up to OOM: to memory; after it: calls of the program that matter to an allocator
    (the block is used on another stream, all streams are done, the cache is given back, peaks start anew, the
    private pool of the event's stream is let go)."""

    ALLOC = 0
    FREE = 1
    SEGMENT_ALLOC = 2
    SEGMENT_FREE = 3
    SEGMENT_MAP = 4
    SEGMENT_UNMAP = 5
    OOM = 6
    RECORD_STREAM = 7
    SYNC = 8
    EMPTY_CACHE = 9
    RESET_PEAK = 10
    RELEASE_POOL = 11


COLUMNS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "action": np.dtype("<u1"),
        "block": np.dtype("<i8"),
        "size_bytes": np.dtype("<i8"),
        "stream": np.dtype("<i4"),
        "address": np.dtype("<u8"),
        "category": np.dtype("<i4"),
        "phase": np.dtype("<i4"),
        "module": np.dtype("<i4"),
        "op": np.dtype("<i4"),
        "where": np.dtype("<i4"),
    }
)
TEXT_COLUMNS = ("category", "phase", "module", "op", "where")
_PACKED = {"action": "B", "block": "q", "size_bytes": "q", "stream": "i", "address": "Q"} | dict.fromkeys(
    TEXT_COLUMNS, "i"
)
Column = npt.NDArray[Any]


class Event(NamedTuple):
    """One row of a trace with its texts looked up; for tests and for showing, not for a million rows."""

    action: Action
    block: int
    size_bytes: int
    stream: int
    address: int
    category: str
    phase: str
    module: str
    op: str
    where: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """An immutable, ordered list of allocation events, held as columns of equal length.

    Args:
        action: an `Action` per event.
        block: pairs an ALLOC with its FREE. Each ALLOC has an id of its own, ids are not used again;
            `NO_BLOCK` where an event has none.
        size_bytes: requested bytes of a block, or the size of a segment, or what an OOM had asked for.
        stream: number of the CUDA stream, 0 for the default one.
        address: device address, 0 where unknown.
        category: index into ``strings``, of one of `CATEGORIES`.
        phase: index into ``strings``, of one of `PHASES`.
        module: index into ``strings``.
        op: index into ``strings``.
        where: index into ``strings``, of a place like ``"a.py:12 main"``.
        strings: the interned texts.
        meta: what the trace is of; plain JSON values.
    """

    action: Column
    block: Column
    size_bytes: Column
    stream: Column
    address: Column
    category: Column
    phase: Column
    module: Column
    op: Column
    where: Column
    strings: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            column = column if column is not getattr(self, name) else column.view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        problem = _problem(self)
        if problem:
            raise ValueError(f"not a trace: {problem}")

    def __len__(self) -> int:
        return len(self.action)

    def __getitem__(self, index: int) -> Event:
        """The event at ``index`` with its texts."""
        row = {name: getattr(self, name)[index].item() for name in COLUMNS}
        row |= {name: self.strings[row[name]] for name in TEXT_COLUMNS}
        return Event(**{**row, "action": Action(row["action"])})

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        same_text = self.strings == other.strings and dict(self.meta) == dict(other.meta)
        return same_text and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]  # mapping and arrays inside

    def texts(self, column: str) -> list[str]:
        """The texts of one of the `TEXT_COLUMNS`, one per event."""
        return [self.strings[index] for index in getattr(self, column).tolist()]

    def alloc_index(self) -> npt.NDArray[np.int64]:
        """For every event the index of its block's ALLOC: its own for an ALLOC, -1 where there is none."""
        allocs = np.flatnonzero(self.action == Action.ALLOC)
        order = np.argsort(self.block[allocs], kind="stable")
        ids = self.block[allocs][order]
        found = np.full(len(self), -1, dtype=np.int64)
        if len(ids):
            place = np.minimum(np.searchsorted(ids, self.block), len(ids) - 1)
            known = (ids[place] == self.block) & (self.block != NO_BLOCK)
            found[known] = allocs[order[place[known]]]
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as one compressed file (a zip of ``.npy`` columns and ``trace.json``), atomically.

        Raises:
            UsageError: the place cannot be written to.
        """
        write_atomically(path, _to_bytes(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `save` wrote. Nothing in the file is executed.

        Raises:
            InputError: no such file, not a trace, broken, or of a newer schema.
        """
        try:
            with open(path, "rb") as file:
                return _from_file(file)
        except OSError as error:
            raise InputError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
        except _BROKEN as error:
            raise InputError(
                f"{os.fspath(path)} is not a whole memfit trace: {_first_line(error)}"
            ) from error


class TraceBuilder:
    """Append events one by one, then `build` the trace.

    Examples:
        >>> builder = TraceBuilder(meta={"of": "an example"})
        >>> block = builder.alloc(4096, category="activation", phase="forward", module="layers.0")
        >>> builder.free(block)
        >>> len(builder.build())
        2
    """

    def __init__(self, *, meta: Mapping[str, Any] | None = None) -> None:
        self.meta: dict[str, Any] = dict(meta or {})
        self._columns = {name: array(code) for name, code in _PACKED.items()}
        self._indices: dict[str, int] = {"": 0}
        self._next_block = 0
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._columns["action"])

    def alloc(self, size_bytes: int, *, block: int | None = None, **columns: Any) -> int:
        """Append an ALLOC of ``size_bytes`` requested bytes; returns its block id, a new one unless given."""
        block = self._next_block if block is None else block
        self._next_block = max(self._next_block, block + 1)
        self._sizes[block] = size_bytes
        self.append(Action.ALLOC, block=block, size_bytes=size_bytes, **columns)
        return block

    def free(self, block: int, **columns: Any) -> None:
        """Append the FREE of a block; its size is that of its ALLOC unless given."""
        columns.setdefault("size_bytes", self._sizes.pop(block, 0))
        self.append(Action.FREE, block=block, **columns)

    def append(
        self,
        action: Action,
        *,
        block: int = NO_BLOCK,
        size_bytes: int = 0,
        stream: int = 0,
        address: int = 0,
        category: str = "other",
        phase: str = "other",
        module: str = "",
        op: str = "",
        where: str = "",
    ) -> None:
        """Append one event of any kind; see `Trace` for the columns."""
        columns = self._columns
        columns["action"].append(action)
        columns["block"].append(block)
        columns["size_bytes"].append(size_bytes)
        columns["stream"].append(stream)
        columns["address"].append(address)
        columns["category"].append(self.intern(category))
        columns["phase"].append(self.intern(phase))
        columns["module"].append(self.intern(module))
        columns["op"].append(self.intern(op))
        columns["where"].append(self.intern(where))

    def intern(self, text: str) -> int:
        """The index of ``text`` in the strings of the trace to be."""
        return self._indices.setdefault(text, len(self._indices))

    def build(self) -> Trace:
        """The trace of what was appended so far; the builder may go on.

        Raises:
            ValueError: the events contradict each other (a block allocated twice, a free before the
                allocation, an unknown category).
        """
        columns = {name: np.array(packed, dtype=COLUMNS[name]) for name, packed in self._columns.items()}
        return Trace(**columns, strings=tuple(self._indices), meta=dict(self.meta))


_BROKEN = (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, NotImplementedError, RuntimeError)
_META_MEMBER = "trace.json"
_LARGEST_META_BYTES = 1 << 30
_NPY_HEADER_BYTES = 4096


def _to_bytes(trace: Trace) -> bytes:
    head = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "event_count": len(trace),
        "strings": list(trace.strings),
        "meta": dict(trace.meta),
    }
    buffer = io.BytesIO()
    # Level 1 is eight times as fast as the default on a million events, and the file is a tenth larger.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_META_MEMBER, json.dumps(head, ensure_ascii=False, allow_nan=False))
        for name in COLUMNS:
            column = io.BytesIO()
            np.lib.format.write_array(column, getattr(trace, name), allow_pickle=False)
            archive.writestr(f"{name}.npy", column.getvalue())
    return buffer.getvalue()


def _from_file(file: io.BufferedReader) -> Trace:
    with zipfile.ZipFile(file) as archive:
        head = json.loads(_member(archive, _META_MEMBER, _LARGEST_META_BYTES))
        if not isinstance(head, dict) or head.get("schema") != SCHEMA:
            raise ValueError("it does not name itself one")
        if head["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"its schema version is {head['schema_version']!r}, this memfit reads {SCHEMA_VERSION}"
            )
        strings, meta, count = head["strings"], head["meta"], head["event_count"]
        if not (isinstance(strings, list) and all(isinstance(text, str) for text in strings)):
            raise ValueError("its strings are not texts")
        if not (isinstance(meta, dict) and isinstance(count, int) and count >= 0):
            raise ValueError("its meta or event_count is not what it should be")
        columns = {name: _column(archive, name, count) for name in COLUMNS}
    return Trace(**columns, strings=tuple(strings), meta=meta)


def _member(archive: zipfile.ZipFile, name: str, largest_bytes: int) -> bytes:
    """One member's content; the size that the archive claims is checked first, so no bomb is unpacked."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"{name} is missing") from None
    if info.file_size > largest_bytes:
        raise ValueError(f"{name} is too large for the events it should hold")
    try:
        return archive.read(info)
    except Exception as error:  # zlib.error has no public base but Exception
        raise ValueError(f"{name} is damaged ({_first_line(error)})") from error


def _column(archive: zipfile.ZipFile, name: str, count: int) -> Column:
    dtype = COLUMNS[name]
    content = _member(archive, f"{name}.npy", count * dtype.itemsize + _NPY_HEADER_BYTES)
    column: Column = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    if column.dtype != dtype or column.shape != (count,):
        raise ValueError(f"column {name} has {column.dtype} {column.shape}, not {dtype} ({count},)")
    return column


def _problem(trace: Trace) -> str | None:
    """What contradicts the rules of a trace, or None."""
    lengths = {name: getattr(trace, name).shape for name in COLUMNS}
    if len(set(lengths.values())) != 1 or len(trace.action.shape) != 1:
        return f"its columns differ in length: {lengths}"
    if len(trace) and int(trace.action.max()) > max(Action):
        return f"unknown action {int(trace.action.max())}"
    return _text_problem(trace) or _block_problem(trace)


def _text_problem(trace: Trace) -> str | None:
    allowed: dict[str, Sequence[str]] = {"category": CATEGORIES, "phase": PHASES}
    for name in TEXT_COLUMNS:
        used = np.unique(getattr(trace, name))
        if len(used) and not 0 <= used[0] <= used[-1] < len(trace.strings):
            return f"column {name} points outside its strings"
        unknown = {trace.strings[index] for index in used} - set(allowed.get(name, trace.strings))
        if unknown:
            return f"unknown {name} {min(unknown)!r}"
    return None


def _block_problem(trace: Trace) -> str | None:
    if len(trace) and int(trace.size_bytes.min()) < 0:
        return "a size is negative"
    allocated = np.sort(trace.block[trace.action == Action.ALLOC])
    freed = np.sort(trace.block[(trace.action == Action.FREE) & (trace.block != NO_BLOCK)])
    for ids, verb in ((allocated, "allocated"), (freed, "freed")):
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            return f"block {int(twice[0])} is {verb} twice"
    if len(allocated) and allocated[0] < 0:
        return f"an ALLOC has block {int(allocated[0])}"
    frees = np.flatnonzero((trace.action == Action.FREE) & (trace.block != NO_BLOCK))
    born = trace.alloc_index()[frees]
    wrong = frees[(born < 0) | (born > frees)]
    return f"block {int(trace.block[wrong[0]])} is freed before it is allocated" if len(wrong) else None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
