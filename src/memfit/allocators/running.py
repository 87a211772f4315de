"""One run of a recording through one allocator: totals after every event, failures, layouts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.allocators.base import OutOfMemory
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.chunks import Chunk
from memfit.allocators.fast.engine import Events, is_worth_it
from memfit.allocators.replay import SegmentLayout, segments_of
from memfit.allocators.restoring import RecordedDevice, give_back_segment, restore
from memfit.core.recording import Recording
from memfit.core.snapshot import Snapshot
from memfit.core.trace import NO_BLOCK, Action, Trace

Bytes = npt.NDArray[np.int64]

_ALLOC, _FREE, _OOM = int(Action.ALLOC), int(Action.FREE), int(Action.OOM)
_RECORD, _SYNC = int(Action.RECORD_STREAM), int(Action.SYNC)
_RELEASE = int(Action.RELEASE_POOL)
_EMPTY, _RESET = int(Action.EMPTY_CACHE), int(Action.RESET_PEAK)
_GIVEN_BACK = (int(Action.SEGMENT_FREE), int(Action.SEGMENT_UNMAP))


class Row(NamedTuple):
    """One event as an allocator sees it. A free of a block from before the trace has a key below zero."""

    action: int
    block: int
    size_bytes: int
    stream: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """What a recording asks of an allocator, made ready once for many runs.

    Attributes:
        events: the events as columns, one to one.
        before: blocks in use at the start as ``(key, requested bytes, stream)``, keys as in the events.
        start: the state at the start, to begin from exactly.
        new_segments: ``(size, address)`` of the segments that the run took from the device, in order.
        last_allocation: the last event that allocates. What failed after it stays where it succeeds.
    """

    events: Events
    before: tuple[tuple[int, int, int], ...]
    start: Snapshot | None
    new_segments: tuple[tuple[int, int], ...]
    last_allocation: int

    def __len__(self) -> int:
        return len(self.events)

    @functools.cached_property
    def rows(self) -> Sequence[Row]:
        """The events one by one; takes 200 bytes for each."""
        events = self.events
        columns = (events.action, events.block, events.size_bytes, events.stream)
        return [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def survived(self, event: int) -> bool:
        """Whether this is a failure of the recorded run after which it went on."""
        return 0 <= event <= self.last_allocation and bool(self.events.action[event] == _OOM)

    @staticmethod
    def of(recording: Recording) -> Program:
        """The program of a recording."""
        trace, start = recording.trace, recording.start
        key_of: dict[int, int] = {}
        before: list[tuple[int, int, int]] = []
        for segment in start.segments if start is not None else ():
            for block in segment.blocks:
                if block.active:
                    key = key_of[block.address] = -2 - len(before)
                    before.append((key, block.requested_bytes or block.size_bytes, segment.stream))
        if recording.held_bytes:
            before.append((-2 - len(before), recording.held_bytes, 0))
        keys = trace.block
        foreign = np.flatnonzero((trace.action == _FREE) & (keys == NO_BLOCK))
        if len(foreign):
            keys = keys.copy()
            keys[foreign] = [key_of.get(address, NO_BLOCK) for address in trace.address[foreign].tolist()]
        allocs = np.flatnonzero(trace.action == _ALLOC)
        return Program(
            events=Events(
                action=trace.action,
                block=keys,
                size_bytes=trace.size_bytes,
                stream=trace.stream,
                address=trace.address.view(np.int64),
                lanes=recording.private_streams,
            ),
            before=tuple(before),
            start=start,
            new_segments=_new_segments(trace),
            last_allocation=int(allocs[-1]) if len(allocs) else -1,
        )


def _new_segments(trace: Trace) -> tuple[tuple[int, int], ...]:
    taken = (trace.action == int(Action.SEGMENT_ALLOC)) & (trace.address > 0)
    return tuple(zip(trace.size_bytes[taken].tolist(), trace.address[taken].tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What an allocator held after one event.

    Attributes:
        event: that event; -1 before the first.
        segments: in address order.
        owners: the key of the block in use at ``(region, offset in it)``.
    """

    event: int
    segments: tuple[SegmentLayout, ...]
    owners: Mapping[tuple[int, int], int]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An allocation that did not fit.

    Attributes:
        event: its number.
        requested_bytes, stream: what it asked for.
        live_bytes, allocated_bytes, reserved_bytes: what was held then, after the cache had been given back.
        released_bytes: what giving the cache back released.
        private_pool: the pool that it was for, 0 for none.
        limit_bytes: what there was.
    """

    event: int
    requested_bytes: int
    stream: int
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int
    released_bytes: int = 0
    private_pool: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What an allocator made of a program.

    Attributes:
        placements: a row per allocation: region, offset; -1, 0 where it failed or was empty.
        reserved_changes: a row each time they changed: event, reserved bytes.
        failures: allocations that ran out of memory, in order.
        stats: the allocator's own.
        live_bytes, allocated_bytes, reserved_bytes: after each event; empty unless asked for.
        layouts: what was held after the events that were asked for, the first failure, and the last event.
        last_event: the event at which the run ended.
        same_places, compared_places: how many allocations landed where they were recorded, of how many.
    """

    placements: Bytes
    reserved_changes: Bytes
    failures: tuple[Failure, ...]
    stats: Mapping[str, Any]
    live_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    last_event: int = -1
    same_places: int = 0
    compared_places: int = 0

    def total(self, name: str, which: int) -> int:
        """One number of the statistics: 0 the current value, 1 the peak."""
        return int(self.stats[name]["all"][which])


def run_caching(
    program: Program, allocator: CachingAllocator, *, exact_start: bool = True, detailed: bool = False,
    stop: bool = True, layouts_at: frozenset[int] = frozenset(), until: int | None = None,
    arrays: bool | None = None,
) -> Run:  # fmt: skip
    """Run a program through PyTorch's allocator.

    Args:
        program: what to run.
        allocator: a fresh one.
        exact_start: begin from the recorded state; otherwise its blocks are allocated first.
        detailed: keep totals after each event, layouts, and compare places with the recorded ones.
        stop: end where memory runs out, as a program does that does not catch it; otherwise leave the
            allocation out and go on. Failures that were recorded, and survived, never end it.
        layouts_at: events after which to keep the layout.
        until: the last event to run; ``None`` for all of them.
        arrays: run over arrays that numba compiles, or event by event over objects; ``None`` takes what is
            faster here. What comes out is the same.
    """
    kind: type[CachingRun] = CachingRun
    if is_worth_it(program.events) if arrays is None else arrays:
        from memfit.allocators.fast.running import ArrayRun

        kind = ArrayRun
    run = kind(program, allocator, detailed, stop, layouts_at)
    run._until = len(program) - 1 if until is None else until
    return run.run(exact_start)


class CachingRun:
    """One run, event by event. What it finds is put together in `_result`."""

    def __init__(
        self, program: Program, allocator: CachingAllocator, detailed: bool, stop: bool,
        layouts_at: frozenset[int],
    ) -> None:  # fmt: skip
        self._program, self._allocator = program, allocator
        self._detailed, self._stop, self._layouts_at = detailed, stop, layouts_at
        self._until = len(program) - 1
        self._last = -1
        self._ended = False
        self._exact = False
        self._chunks: dict[int, Chunk] = {}
        self._placements: list[tuple[int, int]] = []
        self._reserved: list[tuple[int, int]] = []
        self._lanes = program.events.lanes
        self._failures: list[Failure] = []
        self._layouts: dict[int, Layout] = {}
        self._totals: list[tuple[int, int, int]] = []
        self._places = _Places()

    def run(self, exact_start: bool) -> Run:
        self._begin(exact_start)
        if not self._ended:
            self._events()
        return self._result()

    def _events(self) -> None:
        allocator, chunks = self._allocator, self._chunks
        free, detailed, layouts_at = allocator.free, self._detailed, self._layouts_at
        before = allocator.reserved_bytes
        for index, (action, block, size, stream) in enumerate(self._program.rows):
            if action == _ALLOC:
                self._allocate(index, block, size, stream)
            elif action == _FREE:
                chunk = chunks.pop(block, None)
                if chunk is not None:
                    free(chunk)
            else:
                self._other(index, action, block, size, stream)
            if allocator.reserved_bytes != before:
                before = allocator.reserved_bytes
                self._reserved.append((index, before))
            if detailed:
                self._note_totals()
            if index in layouts_at:
                self._keep_layout(index)
            self._last = index
            if self._ended or index == self._until:
                break

    def _begin(self, exact_start: bool) -> None:
        program, allocator = self._program, self._allocator
        self._exact = exact_start
        blocks = program.before
        if exact_start and program.new_segments:
            allocator.device = RecordedDevice(allocator.config.total_bytes, program.new_segments)
            self._places.know_segments(address for _, address in program.new_segments)
        if exact_start and program.start is not None:
            in_use = restore(allocator, program.start, self._lanes)
            known = len(in_use)
            keys = (key for key, _, _ in blocks)
            self._chunks |= dict(zip(keys, in_use.values(), strict=False))
            blocks = blocks[known:]
            self._places.know_segments(segment.address for segment in program.start.segments)
        for key, size, stream in blocks:
            if size:
                self._malloc(-1, key, size, stream)

    def _allocate(self, index: int, block: int, size: int, stream: int) -> None:
        if size == 0:
            self._placements.append((-1, 0))
            return
        chunk = self._malloc(index, block, size, stream)
        if chunk is None:
            self._placements.append((-1, 0))
            return
        self._placements.append((chunk.region.ordinal, chunk.offset))
        if self._detailed:
            self._places.compare(chunk, int(self._program.events.address[index]))

    def _malloc(self, index: int, block: int, size: int, stream: int) -> Chunk | None:
        reserved = self._allocator.reserved_bytes
        real, pool = self._lanes.get(stream, (stream, 0)) if self._lanes else (stream, 0)
        try:
            chunk = self._chunks[block] = self._allocator.malloc(size, real, pool)
        except OutOfMemory as failure:
            self._fail(index, size, stream, failure, reserved)
            return None
        return chunk

    def _fail(self, index: int, size: int, stream: int, failure: OutOfMemory, reserved: int) -> None:
        self._ended = self._stop and not self._program.survived(index)
        real, pool = self._lanes.get(stream, (stream, 0))
        self._failures.append(
            Failure(
                event=index,
                requested_bytes=size,
                stream=real,
                private_pool=pool,
                live_bytes=self._live_bytes(),
                allocated_bytes=failure.allocated_bytes,
                reserved_bytes=failure.reserved_bytes,
                limit_bytes=failure.limit_bytes,
                released_bytes=max(reserved - failure.reserved_bytes, 0),
            )
        )
        if self._detailed and len(self._failures) == 1:
            self._keep_layout(index)

    def _live_bytes(self) -> int:
        return self._allocator.small.requested + self._allocator.large.requested

    def _other(self, index: int, action: int, block: int, size: int, stream: int) -> None:
        allocator = self._allocator
        if action == _RECORD:
            chunk = self._chunks.get(block)
            if chunk is not None:
                allocator.use(chunk, stream)
        elif action == _SYNC:
            allocator.synchronize()
        elif action == _EMPTY:
            allocator.empty_cache()
        elif action == _RESET:
            allocator.stats_book.reset_peaks()
        elif action == _RELEASE:
            allocator.release_pool(self._lanes[stream][1])
        elif action in _GIVEN_BACK:
            self._given_back(index, action, size)
        elif action == _OOM and size:  # it failed in the run; whether it does here is the question
            chunk = self._malloc(index, NO_BLOCK, size, stream)
            if chunk is not None and index <= self._program.last_allocation:
                allocator.free(self._chunks.pop(NO_BLOCK))

    def _given_back(self, index: int, action: int, size: int) -> None:
        """Segments went back to the device in the run: because the program called ``empty_cache``, or the
        allocator was at a limit. In the recorded run just those go; in others the whole cache does, once."""
        if self._exact and action == _GIVEN_BACK[0]:
            address = int(self._program.events.address[index])
            for region in self._allocator.regions.values():
                if region.address == address and region.size == size:
                    give_back_segment(self._allocator, region)
                    return
        if index == 0 or self._program.events.action[index - 1] not in _GIVEN_BACK:
            self._allocator.empty_cache()

    def _note_totals(self) -> None:
        allocator = self._allocator
        small, large = allocator.small, allocator.large
        self._totals.append(
            (small.requested + large.requested, small.bytes + large.bytes, allocator.reserved_bytes)
        )

    def _keep_layout(self, index: int) -> None:
        owners = {(chunk.region.ordinal, chunk.offset): key for key, chunk in self._chunks.items()}
        self._layouts[index] = Layout(event=index, segments=segments_of(self._allocator), owners=owners)

    def _result(self) -> Run:
        if self._detailed:
            self._keep_layout(self._last)
        totals = np.array(self._totals, dtype=np.int64).reshape(-1, 3)
        return Run(
            placements=np.array(self._placements, dtype=np.int64).reshape(-1, 2),
            reserved_changes=np.array(self._reserved, dtype=np.int64).reshape(-1, 2),
            failures=tuple(self._failures),
            stats=self._allocator.stats(),
            live_bytes=totals[:, 0],
            allocated_bytes=totals[:, 1],
            reserved_bytes=totals[:, 2],
            layouts=self._layouts,
            last_event=self._last,
            same_places=self._places.same,
            compared_places=self._places.compared,
        )


class _Places:
    """Where allocations landed against where they were recorded. A range whose recorded address is not known
    (of expandable segments) counts from where its first block was."""

    def __init__(self) -> None:
        self.same = self.compared = 0
        self._bases: dict[int, int] = {}
        self.known: set[int] = set()

    def know_segments(self, addresses: Iterable[int]) -> None:
        """Segments at these addresses are where they were in the run."""
        self.known.update(addresses)

    def compare(self, chunk: Chunk, recorded: int) -> None:
        if not recorded:
            return
        self.compared += 1
        base = self._bases.get(chunk.region.ordinal)
        if base is None:
            address = chunk.region.address
            base = address if address in self.known else recorded - chunk.offset
            self._bases[chunk.region.ordinal] = base
        self.same += base + chunk.offset == recorded
