"""Recording a step of a pool, and serving the steps that follow from a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.allocators.lifetimes import Lifetimes
from memfit.allocators.packing import DEFAULT_EFFORT, pack
from memfit.pools.plans import PlannedPolicy, RecordedBlock, Recorder, StepPlan

if TYPE_CHECKING:
    from memfit.pools.arena import Arena
    from memfit.pools.pool import MemoryPool


class StepRecording:
    """A step while it is recorded, and what was recorded (`MemoryPool.record_step`)."""

    def __init__(self, recorder: Recorder, alignment_bytes: int) -> None:
        self._recorder = recorder
        self._alignment_bytes = alignment_bytes

    @property
    def blocks(self) -> tuple[RecordedBlock, ...]:
        """What the step allocated and freed, with lifetimes, in the order of allocation. What outlives the
        step is not in it: that is state, which the next step finds and does not ask for again."""
        return self._recorder.blocks()

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes of these blocks that lived at once: no plan needs less."""
        return self._lifetimes().peak_live_bytes

    def plan(self, *, effort: int = DEFAULT_EFFORT) -> StepPlan:
        """The blocks packed into as little memory as is found.

        Args:
            effort: of the search for a packing, as `memfit.allocators.packing.pack` takes it.
        """
        packing = pack(self._lifetimes(), alignment_bytes=self._alignment_bytes, effort=effort)
        sizes = (block.size_bytes for block in self.blocks)
        return StepPlan.of(zip(sizes, packing.offsets.tolist(), strict=True))

    def _lifetimes(self) -> Lifetimes:
        return Lifetimes.of((block.born, block.died, block.size_bytes) for block in self.blocks)


class ServedPlan:
    """A plan at work in a pool (`MemoryPool.serve`): call `begin_step` before each step.

    Attributes:
        plan: what is served.
    """

    def __init__(self, pool: MemoryPool, policy: PlannedPolicy, arena: Arena) -> None:
        self.plan = policy.plan
        self._pool = pool
        self._policy = policy
        self._arena = arena
        self._chunk = arena.serve(policy)

    @property
    def served(self) -> int:
        """Allocations that got their planned place."""
        return self._policy.served

    @property
    def refused(self) -> int:
        """Allocations that the plan had no place for, and that the pool's own policy served."""
        return self._policy.refused

    def begin_step(self) -> None:
        """The step starts again: its next allocation is the plan's first."""
        with self._pool.locked():
            self._policy.begin_step()

    def close(self) -> None:
        """Serve no more; the memory is as any chunk's that is given back when it is empty."""
        with self._pool.locked():
            self._policy.retire()
            self._arena.end_plan(self._chunk)

    def __enter__(self) -> ServedPlan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServedPlan of {len(self.plan.blocks)} blocks, {self.served} served, {self.refused} refused>"
