"""Runs of the textbook policies, for comparison with PyTorch's allocator."""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit.allocators import ALLOCATORS
from memfit.allocators.adaptors import allocate_on
from memfit.allocators.address_space import AddressSpaceConfig
from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.comparison import least_total_bytes
from memfit.allocators.outcome import Outcome
from memfit.allocators.packing_bound import lifetimes_of_program
from memfit.allocators.replay import Operation, Step
from memfit.allocators.running import Failure, Program, Run
from memfit.allocators.settings import BLOCK_BYTES
from memfit.core.errors import UsageError
from memfit.core.trace import Action

MOST_SEARCHED_EVENTS = 20_000
"""Beyond this the least memory of a policy is not searched for: that takes a dozen runs."""
ROOM = 4
"""Without a capacity and a search, a policy gets so many times the live peak."""
PRECISION = 0.02
SHARED_BETWEEN_STREAMS = (
    "The run used several streams, which share this policy's range: what one frees serves another at once. "
    "On a GPU that takes an event to wait for; PyTorch's allocator keeps streams apart and needs more for it."
)


def policy_outcome(
    name: str, program: Program, capacity_bytes: int | None, *, stop: bool = True
) -> tuple[Outcome, Run]:
    """What a policy makes of a program: the least memory that serves it, and a run on what there is.

    Args:
        name: of the `ALLOCATORS`.
        program: what to run.
        capacity_bytes: memory of the device; ``None`` gives the policy what it needs.
        stop: end where memory runs out.
    """
    peak = max(lifetimes_of_program(program).rounded_to(BLOCK_BYTES).peak_live_bytes, BLOCK_BYTES)
    least = _least(name, program, peak) if len(program) <= MOST_SEARCHED_EVENTS else None
    heap = capacity_bytes or least or ROOM * peak
    run = run_policy(program, _make(name, heap), stop=stop)
    highest = run.total("reserved_bytes", 1)
    return (
        Outcome(
            name=name,
            kind="policy",
            peak_requested_bytes=run.total("requested_bytes", 1),
            peak_allocated_bytes=run.total("allocated_bytes", 1),
            peak_reserved_bytes=highest if least is None else least,
            reserved_bytes=run.total("reserved_bytes", 0),
            out_of_memory_events=tuple(failure.event for failure in run.failures),
            risks=(SHARED_BETWEEN_STREAMS,) if _has_streams(program) else (),
        ),
        run,
    )


def _has_streams(program: Program) -> bool:
    stream = program.events.stream
    return len(stream) > 0 and bool((stream != stream[0]).any())


def _make(name: str, total_bytes: int) -> BaseAllocator:
    return ALLOCATORS[name](AddressSpaceConfig(total_bytes=total_bytes))


def _least(name: str, program: Program, peak: int) -> int | None:
    """The least memory that serves every allocation; ``None`` where many times the peak is not enough."""
    operations = [Operation(Step.ALLOC, key, size, stream) for key, size, stream in program.before]
    steps = {int(Action.ALLOC): Step.ALLOC, int(Action.FREE): Step.FREE}
    operations += [
        Operation(steps[action], key, size, stream)
        for action, key, size, stream in program.rows
        if action in steps
    ]
    try:
        return least_total_bytes(
            operations, lambda total: _make(name, total), from_bytes=peak, step=PRECISION
        )
    except UsageError:
        return None


def run_policy(program: Program, allocator: BaseAllocator, *, stop: bool = True) -> Run:
    """Run a program through any policy. Streams, caches and pending events mean nothing to most of them."""
    return _PolicyRun(program, allocator, stop).run()


class _PolicyRun:
    def __init__(self, program: Program, allocator: BaseAllocator, stop: bool) -> None:
        self._program, self._allocator, self._stop = program, allocator, stop
        self._blocks: dict[int, Block] = {}
        self._placements: list[tuple[int, int]] = []
        self._failures: list[Failure] = []
        self._requested, self._allocated, self._highest = [0, 0], [0, 0], 0

    def run(self) -> Run:
        last = -1
        for key, size, stream in self._program.before:
            self._allocate(-1, key, size, stream)
        for index, (action, key, size, stream) in enumerate(self._program.rows):
            if self._stop and self._failures:
                break
            last = index
            if action == Action.ALLOC:
                self._allocate(index, key, size, stream)
            elif action == Action.FREE and (block := self._blocks.pop(key, None)) is not None:
                self._count(-block.requested_bytes, -block.size_bytes)
                self._allocator.deallocate(block)
        return self._result(last)

    def _allocate(self, index: int, key: int, size: int, stream: int) -> None:
        try:
            block = self._blocks[key] = allocate_on(self._allocator, size, stream)
        except OutOfMemory as failure:
            self._fail(index, size, stream, failure)
        else:
            self._count(size, block.size_bytes)
            self._highest = max(self._highest, block.offset_bytes + block.size_bytes)
            if index >= 0:
                self._placements.append((block.region, block.offset_bytes) if size else (-1, 0))

    def _count(self, requested: int, allocated: int) -> None:
        for gauge, change in ((self._requested, requested), (self._allocated, allocated)):
            gauge[0] += change
            gauge[1] = max(gauge)

    def _fail(self, index: int, size: int, stream: int, failure: OutOfMemory) -> None:
        if index >= 0:
            self._placements.append((-1, 0))
        self._failures.append(
            Failure(
                event=index,
                requested_bytes=size,
                stream=stream,
                live_bytes=self._requested[0],
                allocated_bytes=failure.allocated_bytes,
                reserved_bytes=failure.reserved_bytes,
                limit_bytes=failure.limit_bytes,
            )
        )

    def _result(self, last: int) -> Run:
        nothing = np.zeros(0, dtype=np.int64)
        stats: dict[str, Any] = {
            "requested_bytes": {"all": self._requested},
            "allocated_bytes": {"all": self._allocated},
            "reserved_bytes": {"all": [self._highest, self._highest]},
        }
        return Run(
            placements=np.array(self._placements, dtype=np.int64).reshape(-1, 2),
            reserved_changes=np.zeros((0, 2), dtype=np.int64),
            failures=tuple(self._failures),
            stats=stats,
            live_bytes=nothing,
            allocated_bytes=nothing,
            reserved_bytes=nothing,
            last_event=last,
        )
