"""The whole front: for budgets from the least possible to the plain step's, the fastest plan, the best known
schedule, and the certified bound.

One session serves all budgets: options are measured once, the program is solved for each budget, and what was
run for one budget is remembered for the next. Plans run in forks, which reserve to the byte what a process of
their own does (with the dry run), so no plan is run twice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness, checked_grade
from memfit.planning.bench import Bench, Oracle, Try, by_seconds
from memfit.planning.bound import lower_bounds
from memfit.planning.explore import Explorer, Progress
from memfit.planning.figures import Candidate, StepFigures
from memfit.planning.fit import checked_host_memory, no_progress, workload_and_spec
from memfit.planning.layout import ordered_blocks
from memfit.planning.oracle import Engine, open_oracle
from memfit.planning.plan import SCHEMA_VERSION
from memfit.planning.schedules import NO_LEVER

if TYPE_CHECKING:
    from memfit.core.workload import Workload

POINTS = 10
LOCAL_STEPS = 4
"""Neighbours of a plan that are tried for one budget; neighbouring budgets try theirs as well."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One budget of the front.

    Attributes:
        budget_bytes: for reserved bytes.
        plan: the fastest of all that was run and stays within it; None where nothing does.
        peer: the fastest schedule with a name that stays within it.
        lower_bound_percent: certified least recomputation within the budget, in predicted time, for schedules
            that only keep and recompute; None where no schedule at all is proven to exist.
    """

    budget_bytes: int
    plan: Candidate | None
    peer: Candidate | None
    lower_bound_percent: float | None

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "budget_bytes": self.budget_bytes,
            "plan": None if self.plan is None else self.plan.to_json(),
            "peer": None if self.peer is None else self.peer.to_json(),
            "lower_bound_percent": self.lower_bound_percent,
        }


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep found: ``points`` from the least budget to the plain step's; ``peers`` are all schedules
    with a name that were run, ``front`` the plans that no other beats in both reserved bytes and time."""

    workload: str
    workload_spec: str | None
    gpu: str
    engine: str
    engine_reason: str | None
    torch: str | None
    allow: Exactness
    plain: StepFigures
    points: tuple[SweepPoint, ...]
    front: tuple[Candidate, ...]
    peers: tuple[Candidate, ...]
    evaluations: int
    planning_seconds: float
    wall_seconds: float
    notes: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `memfit fit --sweep --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload,
            "workload_spec": self.workload_spec,
            "gpu": self.gpu,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "torch": self.torch,
            "allow": self.allow,
            "plain": {**self.plain.to_json(), "trace_path": None},
            "points": [point.to_json() for point in self.points],
            "front": [candidate.to_json() for candidate in self.front],
            "peers": [candidate.to_json() for candidate in self.peers],
            "evaluations": self.evaluations,
            "planning_seconds": self.planning_seconds,
            "wall_seconds": self.wall_seconds,
            "notes": list(self.notes),
            "not_modelled": list(self.not_modelled),
            "seed": self.seed,
        }


def sweep(
    workload: Workload | str,
    *,
    gpu: GPU | str,
    points: int = POINTS,
    allow: Exactness = "exact",
    progress: Progress | None = None,
    engine: Engine = "auto",
    seed: int = 0,
    host_memory: int | str | None = None,
) -> SweepResult:
    """The front of a workload's training step on ``gpu``: budget against predicted time.

    Args:
        workload: as for `memfit.plan`.
        gpu: as for `memfit.plan`; budgets may exceed what it has, the front is drawn whole.
        points: how many budgets, spread evenly over reserved bytes from the least that anything tried needs
            to what the plain step takes; at least 2.
        allow: how far results may move.
        progress: called with ``(stage, done, total)``.
        engine: as for `memfit.plan`.
        seed: of everything random in the workload.
        host_memory: as for `memfit.plan`.

    Raises:
        UsageError, WorkloadFailed, CannotRunHere: as `memfit.plan`.
    """
    started = time.perf_counter()
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if points < 2:
        raise UsageError(f"a sweep of {points} budgets draws nothing: use 2 or more")
    checked_grade(allow)
    host_budget_bytes = checked_host_memory(host_memory)
    reference, spec = workload_and_spec(workload)
    with (
        tempfile.TemporaryDirectory(prefix="memfit-") as folder,
        open_oracle(reference, spec, device, Path(folder), engine=engine, seed=seed) as oracle,
    ):
        oracle.facts()
        planning = time.perf_counter()
        found = FrontSearch(
            oracle=oracle,
            gpu=device,
            allow=allow,
            progress=progress or no_progress,
            points=points,
            host_budget_bytes=host_budget_bytes,
        )
        result = found.run()
        now = time.perf_counter()
        return _result(
            found, result, spec=spec, planning_seconds=now - planning, wall_seconds=now - started, seed=seed
        )


@dataclass(kw_only=True)
class FrontSearch:
    """The search behind a sweep, over any oracle."""

    oracle: Oracle
    gpu: GPU
    allow: Exactness = "exact"
    progress: Progress = no_progress
    points: int = POINTS
    host_budget_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    bench: Bench = field(init=False)
    plain: Try = field(init=False)
    explorer: Explorer = field(init=False)
    name: str = field(default="", init=False)

    def run(self) -> tuple[SweepPoint, ...]:
        """The points, from the least budget up. Errors of the workload come through as they are."""
        self.progress("plain step", 0, 1)
        facts, graph = self.oracle.facts(), self.oracle.graph(())
        blocks = ordered_blocks(graph, facts.blocks)
        self.name = graph.name
        self.bench = bench = Bench(self.oracle, self.gpu, blocks)
        seconds = bench.seconds(graph)
        plain = bench.evaluate("plain", NO_LEVER, (None,) * len(blocks), sum(seconds), named=True)
        self.plain = bench.finish(plain)
        self.explorer = explorer = Explorer(
            bench=bench,
            facts=facts,
            graph=graph,
            plain=self.plain,
            allow=self.allow,
            progress=lambda stage, done, total: None,
            notes=self.notes,
            local_steps=LOCAL_STEPS,
            all_named=True,
            host_budget_bytes=self.host_budget_bytes,
        )
        self.progress("leanest plans", 0, 1)
        explorer.explore(1)  # nothing fits that: the leanest plan of each lever is run, and all known ones
        budgets = self._budgets()
        for number, budget in enumerate(budgets):
            self.progress("front", number, len(budgets))
            if not self._reserves(self.plain) <= budget:
                explorer.explore(budget)
        self.progress("lower bound", 0, 1)
        rooms = [budget - graph.beside_bytes for budget in budgets]
        return self._points(budgets, lower_bounds(graph, seconds, rooms), sum(seconds))

    def _budgets(self) -> tuple[int, ...]:
        possible = [self._reserves(t) for t in self.bench.tries.values() if t.peaks.failure is None]
        low, high = min(possible), self._reserves(self.plain)
        if high <= low:
            return (high,)
        return tuple(low + (high - low) * n // (self.points - 1) for n in range(self.points))

    def _points(
        self, budgets: Sequence[int], bounds: Sequence[Any], plain_seconds: float
    ) -> tuple[SweepPoint, ...]:
        made = []
        for budget, bound in zip(budgets, bounds, strict=True):
            within = [
                t
                for t in self.bench.tries.values()
                if t.peaks.failure is None and self._reserves(t) <= budget
            ]
            best = min(within, key=by_seconds, default=None)
            peer = min((t for t in within if _is_peer(t)), key=by_seconds, default=None)
            made.append(
                SweepPoint(
                    budget_bytes=budget,
                    plan=self._candidate(best),
                    peer=self._candidate(peer),
                    lower_bound_percent=100.0 * bound.cost / plain_seconds
                    if bound.feasible and plain_seconds
                    else None,
                )
            )
        return tuple(made)

    def front(self) -> tuple[Candidate, ...]:
        """The plans that no other beats in both reserved bytes and time, least bytes first."""
        rows = [t for t in self.bench.tries.values() if t.peaks.failure is None]
        left: list[Candidate] = []
        fastest = float("inf")
        for tried in sorted(rows, key=lambda t: (self._reserves(t), by_seconds(t))):
            if by_seconds(tried)[0] < fastest:
                fastest = by_seconds(tried)[0]
                left.append(self._shown(tried))
        return tuple(left)

    def peers(self) -> tuple[Candidate, ...]:
        """Every schedule with a name that was run without other levers."""
        named = [t for t in self.bench.tries.values() if _is_peer(t) and not t.peaks.failure]
        return tuple(self._shown(tried) for tried in sorted(named, key=self._reserves))

    def _candidate(self, tried: Try | None) -> Candidate | None:
        return None if tried is None else self._shown(tried)

    def _shown(self, tried: Try) -> Candidate:
        return tried.candidate(self.plain.seconds, self._reserves(tried))

    @staticmethod
    def _reserves(tried: Try) -> int:
        if tried.final is not None:
            return tried.final.figures.peak_reserved_bytes
        return tried.peaks.reserved_bytes


def _is_peer(tried: Try) -> bool:
    """A schedule with a name, whatever the allocator's settings."""
    return tried.named and not tried.lever.step_settings


def _result(
    found: FrontSearch, points: tuple[SweepPoint, ...], *, spec: str | None, seed: int, **seconds: float
) -> SweepResult:
    final = found.plain.final
    assert final is not None
    return SweepResult(
        workload=found.name,
        workload_spec=spec,
        gpu=found.gpu.key,
        engine=found.oracle.engine,
        engine_reason=found.oracle.engine_reason,
        torch=final.torch,
        allow=found.allow,
        plain=final.figures,
        points=points,
        front=found.front(),
        peers=found.peers(),
        evaluations=found.bench.evaluations,
        notes=tuple(found.notes),
        not_modelled=final.not_modelled,
        seed=seed,
        planning_seconds=seconds["planning_seconds"],
        wall_seconds=seconds["wall_seconds"],
    )
