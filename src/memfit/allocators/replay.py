"""Replay what a program asked for through an allocator: where each block lands, what is reserved when.

Traces are memfit's own (`memfit.core.trace.Trace`) or JSON lines, one operation a line:

    {"op": "config", "total_bytes": 8589934592, "fraction": 0.6}     optional, first
    {"op": "alloc", "id": 1, "size": 4096, "stream": 0}
    {"op": "free", "id": 1}
    {"op": "record_stream", "id": 1, "stream": 2}
    {"op": "empty_cache"}    {"op": "sync"}    {"op": "reset_peak"}
    {"op": "alloc", "id": 2, "size": 4096, "pool": 1}    {"op": "release_pool", "pool": 1}    a private pool
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.allocators.base import OutOfMemory
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.chunks import FREE, PENDING, UNMAPPED, Chunk
from memfit.allocators.fast.engine import Engine, Events, is_worth_it
from memfit.core.errors import InputError
from memfit.core.trace import Action, Trace

STATE_LETTERS = {FREE: "I", PENDING: "P"}


class Step(IntEnum):
    """What one operation of a replay does."""

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2
    SYNC = 3
    EMPTY_CACHE = 4
    RESET_PEAK = 5
    RELEASE_POOL = 6


_ACTIONS = {step: int(Action[step.name]) for step in Step}
_NAMES = {step.name.lower(): step for step in Step}


class Operation(NamedTuple):
    """One operation; ``block`` pairs an allocation with its free, ``size_bytes`` is what is asked for."""

    step: int
    block: int = 0
    size_bytes: int = 0
    stream: int = 0
    pool: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block of a segment; state ``"A"`` allocated, ``"P"`` freed but in use by another stream, ``"I"``
    free. ``requested_bytes`` of a free block is what its last use asked for."""

    offset_bytes: int
    size_bytes: int
    requested_bytes: int
    state: str


@dataclass(frozen=True, kw_only=True)
class SegmentLayout:
    """One stretch of device memory that an allocator holds, as ``torch.cuda.memory_snapshot`` shows it."""

    region: int
    offset_bytes: int
    size_bytes: int
    pool: str
    stream: int
    expandable: bool
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    blocks: tuple[BlockLayout, ...]
    private_pool: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayResult:
    """What an allocator made of a trace.

    Attributes:
        placements: a row per allocation: region, offset in it; -1, 0 where it failed or was empty.
        reserved: a row each time they changed: operation, reserved bytes after it.
        ooms: operations that ran out of memory; they and later uses of their blocks are skipped.
        stats: as `CachingAllocator.stats`.
        segments: what is held at the end, in address order.
        peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes: over the whole replay (or since the
            last ``reset_peak``).
    """

    event_count: int
    placements: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    ooms: tuple[int, ...]
    stats: dict[str, Any]
    segments: tuple[SegmentLayout, ...]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class OperationList:
    """Operations, and what their file says about the device."""

    operations: Sequence[Operation]
    total_bytes: int | None = None
    fraction: float | None = None
    source: str = field(default="", compare=False)


def read_operations(path: str | os.PathLike[str]) -> OperationList:
    """Read JSON lines.

    Raises:
        InputError: a line that is not an operation; the message names it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return parse_operations(file, source=os.fspath(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error}") from error


def parse_operations(lines: Iterable[str], *, source: str = "trace") -> OperationList:
    """Read JSON lines that are at hand; see `read_operations`."""
    operations: list[Operation] = []
    config: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if entry["op"] == "config":
                if operations or config:
                    raise ValueError("config must be the first line")
                config = entry
            else:
                operations.append(_operation(entry))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{source}:{number}: not an operation ({what}): {line.strip()[:80]}") from error
    return OperationList(
        operations=operations,
        total_bytes=config.get("total_bytes"),
        fraction=config.get("fraction"),
        source=source,
    )


def _operation(entry: dict[str, Any]) -> Operation:
    step = _NAMES.get(entry["op"])
    if step is None:
        raise ValueError(f"unknown op {entry['op']!r}")
    needs_block = step in (Step.ALLOC, Step.FREE, Step.RECORD_STREAM)
    size = int(entry["size"]) if step is Step.ALLOC else 0
    stream = int(entry["stream"]) if step is Step.RECORD_STREAM else int(entry.get("stream", 0))
    if size < 0:
        raise ValueError(f"size {size} is negative")
    pool = int(entry["pool"]) if step is Step.RELEASE_POOL else int(entry.get("pool", 0))
    return Operation(int(step), int(entry["id"]) if needs_block else 0, size, stream, pool)


def operations_of(trace: Trace) -> OperationList:
    """The allocations and frees of a memfit trace, in order; what the device did at the time is left out."""
    steps = {int(Action.ALLOC): int(Step.ALLOC), int(Action.FREE): int(Step.FREE)}
    columns = (trace.action, trace.block, trace.size_bytes, trace.stream)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    operations = [
        Operation(steps[action], block, size, stream)
        for action, block, size, stream in rows
        if action in steps and block >= 0
    ]
    return OperationList(operations=operations)


def replay(
    trace: Trace | OperationList | str | os.PathLike[str], config: CachingConfig | None = None
) -> ReplayResult:
    """Replay a trace (or a JSON-lines file) through the caching allocator.

    Without a config, the device is what the trace's own config line says. With one, the config decides.
    Events of other streams wait for a ``sync``, unless the config says ``events="instant"``.
    """
    if isinstance(trace, Trace):
        events = events_of(trace)
        if is_worth_it(events):
            return replay_events(events, CachingAllocator(config or config_for(OperationList(operations=()))))
        listed = operations_of(trace)
    elif isinstance(trace, OperationList):
        listed = trace
    else:
        listed = read_operations(trace)
    return replay_operations(listed.operations, CachingAllocator(config or config_for(listed)))


def events_of(trace: Trace | Sequence[Operation]) -> Events:
    """A trace's allocations and frees, or operations, as columns."""
    lanes: dict[int, tuple[int, int]] = {}
    if isinstance(trace, Trace):
        chosen = np.isin(trace.action, (int(Action.ALLOC), int(Action.FREE))) & (trace.block >= 0)
        columns = [trace.action, trace.block, trace.size_bytes, trace.stream]
        if not chosen.all():
            columns = [column[chosen] for column in columns]
        action, block, size, stream = columns
    else:
        steps, block, size, stream, pool = np.array(trace, dtype=np.int64).reshape(-1, 5).T
        if pool.any():
            pairs = np.array([stream, pool])
            own, stream[pool > 0] = np.unique(pairs[:, pool > 0], axis=1, return_inverse=True)
            first = int(pairs[0].max()) + 1
            stream[pool > 0] += first
            lanes = {first + row: (int(of), int(which)) for row, (of, which) in enumerate(own.T)}
        action = np.array([_ACTIONS[step] for step in Step], dtype=np.uint8)[steps]
    return Events(
        action=action,
        block=block,
        size_bytes=size,
        stream=stream.astype(np.int32, copy=False),
        address=np.zeros(0, dtype=np.int64),
        lanes=lanes,
    )


def replay_events(events: Events, allocator: CachingAllocator) -> ReplayResult:
    """Replay columns over arrays, which numba compiles where it is there; as `replay_operations`."""
    engine = Engine(allocator, events)
    ooms: list[int] = []
    at = 0
    while at < len(events):
        failed, at = engine.run(at, len(events))
        if failed:
            ooms.append(at - 1)
    engine.store()
    return _result(allocator, len(events), engine.placements, engine.changes, ooms)


def config_for(listed: OperationList, **changes: Any) -> CachingConfig:
    """The config that a list of operations asks for, with changes."""
    config = CachingConfig(memory_fraction=listed.fraction, events="manual")
    if listed.total_bytes is not None:
        config = replace(config, total_bytes=listed.total_bytes)
    return replace(config, **changes)


def replay_operations(operations: Sequence[Operation], allocator: CachingAllocator) -> ReplayResult:
    """Replay operations through an allocator that is at hand (and may hold blocks already)."""
    live: dict[int, Chunk] = {}
    placements: list[tuple[int, int]] = []
    reserved: list[tuple[int, int]] = []
    ooms: list[int] = []
    malloc, free = allocator.malloc, allocator.free
    before = allocator.reserved_bytes
    alloc_step, free_step = int(Step.ALLOC), int(Step.FREE)
    for index, (step, block, size, stream, pool) in enumerate(operations):
        if step == alloc_step:
            if size == 0:
                placements.append((-1, 0))
                continue
            try:
                chunk = live[block] = malloc(size, stream, pool)
                placements.append((chunk.region.ordinal, chunk.offset))
            except OutOfMemory:
                ooms.append(index)
                placements.append((-1, 0))
        elif step == free_step:
            freed = live.pop(block, None)
            if freed is not None:
                free(freed)
            continue  # a free never changes what is reserved
        else:
            _other_step(allocator, step, live.get(block), pool or stream)
        if allocator.reserved_bytes != before:
            before = allocator.reserved_bytes
            reserved.append((index, before))
    return _result(allocator, len(operations), placements, reserved, ooms)


def _result(
    allocator: CachingAllocator,
    count: int,
    placements: npt.ArrayLike,
    reserved: npt.ArrayLike,
    ooms: Sequence[int],
) -> ReplayResult:
    book = allocator.stats_book
    return ReplayResult(
        event_count=count,
        placements=np.array(placements, dtype=np.int64).reshape(-1, 2),
        reserved=np.array(reserved, dtype=np.int64).reshape(-1, 2),
        ooms=tuple(ooms),
        stats=allocator.stats(),
        segments=segments_of(allocator),
        peak_requested_bytes=book.peak_requested_bytes,
        peak_allocated_bytes=book.peak_allocated_bytes,
        peak_reserved_bytes=book.peak_reserved_bytes,
    )


def _other_step(allocator: CachingAllocator, step: int, chunk: Chunk | None, number: int) -> None:
    if step == Step.EMPTY_CACHE:
        allocator.empty_cache()
    elif step == Step.SYNC:
        allocator.synchronize()
    elif step == Step.RESET_PEAK:
        allocator.stats_book.reset_peaks()
    elif step == Step.RELEASE_POOL:
        allocator.release_pool(number)
    elif chunk is not None:
        allocator.use(chunk, number)


def segments_of(allocator: CachingAllocator) -> tuple[SegmentLayout, ...]:
    """What an allocator holds now, in address order; of an expandable range, each mapped stretch."""
    runs: list[list[Chunk]] = []
    previous: Chunk | None = None
    for chunk in allocator.chunks():
        if chunk.state != UNMAPPED:
            if previous is None or chunk.prev is not previous:
                runs.append([])
            runs[-1].append(chunk)
        previous = None if chunk.state == UNMAPPED else chunk
    return tuple(_segment(run) for run in runs)


def _segment(run: Sequence[Chunk]) -> SegmentLayout:
    first = run[0]
    active = [chunk for chunk in run if chunk.state != FREE]
    return SegmentLayout(
        region=first.region.ordinal,
        offset_bytes=first.offset,
        size_bytes=sum(chunk.size for chunk in run),
        pool="small" if first.home.small else "large",
        stream=first.home.stream,
        private_pool=first.home.shared.pool,
        expandable=bool(first.region.page_bytes),
        allocated_bytes=sum(chunk.size for chunk in active if chunk.state != PENDING),
        active_bytes=sum(chunk.size for chunk in active),
        requested_bytes=sum(chunk.requested for chunk in active),
        blocks=tuple(
            BlockLayout(
                offset_bytes=chunk.offset - first.offset,
                size_bytes=chunk.size,
                requested_bytes=chunk.requested,
                state=STATE_LETTERS.get(chunk.state, "A"),
            )
            for chunk in run
        ),
    )
