"""Runs of the textbook policies, for comparison with PyTorch's allocator."""

from __future__ import annotations

from memfit.allocators import ALLOCATORS
from memfit.allocators.outcome import Outcome
from memfit.allocators.running import Program, Run, run_policy


def policy_outcome(
    name: str, program: Program, limit_bytes: int, *, stop: bool = True
) -> tuple[Outcome, Run]:
    """What a policy makes of a program on a heap of so many bytes."""
    allocator = ALLOCATORS[name](limit_bytes)
    run = run_policy(program, allocator, stop=stop)
    outcome = Outcome(
        name=name,
        kind="policy",
        peak_requested_bytes=run.total("requested_bytes", 1),
        peak_allocated_bytes=run.total("allocated_bytes", 1),
        peak_reserved_bytes=run.total("reserved_bytes", 1),
        reserved_bytes=run.total("reserved_bytes", 0),
        out_of_memory_events=tuple(failure.event for failure in run.failures),
    )
    return outcome, run
