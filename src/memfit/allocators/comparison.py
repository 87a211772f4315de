"""Policies on the same operations: what each wastes, and the least memory with which it serves them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.allocators.adaptors import allocate_on
from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.replay import Operation, Step
from memfit.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """What a policy made of a list of operations.

    Attributes:
        served: how many allocations it served.
        failed: indices of the operations that ran out of memory; their frees are skipped.
        peak_requested_bytes: most bytes asked for by blocks that were out at once.
        peak_allocated_bytes: most bytes of the blocks themselves; more by what rounding wastes inside blocks.
        highest_end_bytes: the highest offset that a block reached in its region.
        seconds: processor time of all calls.
    """

    served: int
    failed: tuple[int, ...]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    highest_end_bytes: int
    seconds: float

    @property
    def internal_waste(self) -> float:
        """Share of the peak of allocated bytes that nobody asked for."""
        return 1 - self.peak_requested_bytes / self.peak_allocated_bytes if self.peak_allocated_bytes else 0.0


def run_policy(
    operations: Sequence[Operation], allocator: BaseAllocator, *, stop_at_failure: bool = False
) -> PolicyRun:
    """Run the allocations and frees of a list through any allocator; other operations are left out."""
    live: dict[int, Block] = {}
    failed: list[int] = []
    served = requested = allocated = peak_requested = peak_allocated = highest = 0
    began = time.process_time()
    for index, (step, number, size, stream, _) in enumerate(operations):
        if step == Step.ALLOC:
            try:
                block = live[number] = allocate_on(allocator, size, stream)
            except OutOfMemory:
                failed.append(index)
                if stop_at_failure:
                    break
                continue
            served += 1
            requested += size
            allocated += block.size_bytes
            peak_requested = max(peak_requested, requested)
            peak_allocated = max(peak_allocated, allocated)
            highest = max(highest, block.offset_bytes + block.size_bytes)
        elif step == Step.FREE and number in live:
            block = live.pop(number)
            requested -= block.requested_bytes
            allocated -= block.size_bytes
            allocator.deallocate(block)
    return PolicyRun(
        served=served,
        failed=tuple(failed),
        peak_requested_bytes=peak_requested,
        peak_allocated_bytes=peak_allocated,
        highest_end_bytes=highest,
        seconds=time.process_time() - began,
    )


def least_total_bytes(
    operations: Sequence[Operation],
    make: Callable[[int], BaseAllocator],
    *,
    from_bytes: int,
    step: float = 0.005,
    most_times: float = 16.0,
) -> int:
    """The least memory with which a policy serves all operations, to a part ``step`` of ``from_bytes``.

    Found by bisection, as if more memory never hurt. It can (where a policy's choices depend on the size of
    the range), so the answer is a size that serves, with one a step below it that does not.

    Args:
        make: the policy over so many bytes.
        from_bytes: a lower bound: the peak of live bytes.

    Raises:
        UsageError: not even ``most_times`` that much serves.
    """
    unit = max(1, int(from_bytes * step))

    def serves(units: int) -> bool:
        return not run_policy(operations, make(from_bytes + units * unit), stop_at_failure=True).failed

    low, high = -1, 0
    while not serves(high):
        low, high = high, max(1, high * 2)
        if from_bytes + high * unit > most_times * from_bytes:
            raise UsageError(f"the policy does not serve the operations in {most_times:g} times their peak")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return from_bytes + high * unit
