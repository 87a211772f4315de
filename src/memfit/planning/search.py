"""The search: measure the options, solve under each lever, run what comes out, and take the fastest plan that
really fits.

    plain step → options measured in captured steps
    → for each lever: named schedules, solve → run → tighten, local search
    → the fastest candidates again in processes of their own, on reserved bytes → the first that fits

Deterministic: the same workload, GPU, budget and versions give the same plan. Only wall time is not looked
at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import UsageError, WorkloadFailed
from memfit.core.exactness import Exactness
from memfit.planning.bench import Bench, Final, ModelFacts, Oracle, Try
from memfit.planning.figures import Settings, StepFigures
from memfit.planning.layout import Layout, ordered_blocks
from memfit.planning.problem import Option
from memfit.planning.problems import (
    Row,
    choice_of,
    make_problem,
    measured_options,
    mixes,
    row_of_blocks,
    wanted_saves,
)
from memfit.planning.refine import LeverProblem, Refiner
from memfit.planning.schedules import NO_LEVER, Lever, levers, named_schedules
from memfit.planning.solve import solve

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: called as the search goes on."""

OPTIONS_PER_BLOCK = 12
MOST_MIXES = 10
LOCAL_STEPS = 10
FRONT_POINTS = 4
"""Plans for other budgets that are run for the picture of the time-memory front."""
FINALISTS = 12
OPTIMISM = 0.0
"""A fresh process may reserve this much less than the quick measurement says, so such plans are tried as
well."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found: ``chosen`` is None when nothing fits, and ``least`` then needs the least of all
    tried."""

    plain: Final
    graph: StepGraph
    op_seconds: tuple[float, ...]
    facts: ModelFacts
    chosen: Try | None
    least: Try | None
    best_named: Try | None
    tries: tuple[Try, ...]
    evaluations: int
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Search:
    """One search for one workload, GPU and budget."""

    oracle: Oracle
    gpu: GPU
    budget_bytes: int
    allow: Exactness = "exact"
    progress: Progress = lambda stage, done, total: None
    notes: list[str] = field(default_factory=list)

    def run(self) -> Outcome:
        """Searches. Errors of the workload come through as they are."""
        self.progress("plain step", 0, 1)
        facts = self.oracle.facts()
        graph = self.oracle.graph(())
        blocks = ordered_blocks(graph, facts.blocks)
        bench = Bench(self.oracle, self.gpu, blocks)
        plain_try = bench.evaluate(
            "plain", NO_LEVER, (None,) * len(blocks), sum(bench.seconds(graph)), named=True
        )
        plain_try = bench.finish(plain_try)
        plain = plain_try.final
        assert plain is not None
        self.progress("plain step", 1, 1)
        chosen = None
        if plain.figures.peak_reserved_bytes <= self.budget_bytes:
            chosen = self._choose(bench)
        else:
            session = _Session(self, bench, facts, graph, plain_try)
            session.explore(self.budget_bytes)
            chosen = self._choose(bench)
            surprise = self._surprise(bench)
            if chosen is None and 0 < surprise < self.budget_bytes:
                session.explore(self.budget_bytes - surprise)
                chosen = self._choose(bench)
        return Outcome(
            plain=plain,
            graph=graph,
            op_seconds=tuple(bench.seconds(graph)),
            facts=facts,
            chosen=chosen,
            least=None if chosen is not None else self._least(bench),
            best_named=self._best_named(bench, chosen),
            tries=tuple(bench.tries.values()),
            evaluations=bench.evaluations,
            notes=tuple(self.notes),
        )

    def _choose(self, bench: Bench) -> Try | None:
        """The fastest plan that fits, by processes of their own; quick peaks only say which to ask first."""
        hopeful = self.budget_bytes * (1 + OPTIMISM)
        untried = [t for t in bench.tries.values() if t.peaks.failure is None and t.final is None]
        possible = [t for t in bench.tries.values() if t.final is not None and self._holds(t)]
        best = min(possible, key=_by_seconds, default=None)
        hopefuls = sorted((t for t in untried if t.peaks.reserved_bytes <= hopeful), key=_by_seconds)
        for asked, tried in enumerate(hopefuls[:FINALISTS]):
            if best is not None and _by_seconds(best) < _by_seconds(tried):
                break
            self.progress("finalists", asked, FINALISTS)
            final = bench.finish(tried)
            if self._holds(final):
                best = final
                break
        self.progress("finalists", FINALISTS, FINALISTS)
        return best

    def _holds(self, tried: Try) -> bool:
        return tried.final is not None and _reserved(tried) <= self.budget_bytes

    @staticmethod
    def _surprise(bench: Bench) -> int:
        """The most that a process of its own reserved over the quick measurement of the same plan."""
        return max(
            (_reserved(t) - t.peaks.reserved_bytes for t in bench.tries.values() if t.final is not None),
            default=0,
        )

    def _least(self, bench: Bench) -> Try | None:
        """Of the plans that reserve least, the one that needs least in a process of its own."""
        possible = [t for t in bench.tries.values() if t.peaks.failure is None]
        nearest = sorted(possible, key=lambda t: (t.peaks.reserved_bytes, t.key))[:3]
        finals = [bench.finish(t) for t in nearest]
        return min((t for t in finals if t.final is not None), key=_reserved, default=None)

    def _best_named(self, bench: Bench, chosen: Try | None) -> Try | None:
        """The fastest named schedule that fits in a process of its own."""
        if chosen is None:
            return None
        hopeful = self.budget_bytes * (1 + OPTIMISM)
        named = [t for t in bench.tries.values() if t.named and t.peaks.failure is None]
        for tried in sorted(named, key=_by_seconds):
            if tried.peaks.reserved_bytes <= hopeful and self._holds(bench.finish(tried)):
                return bench.finish(tried)
        return None


@dataclass
class _Session:
    """The exploring part of one search."""

    search: Search
    bench: Bench
    facts: ModelFacts
    graph: StepGraph
    plain: Try
    budget_bytes: int = 0
    options: tuple[dict[tuple[str, ...], Option], ...] | None = None

    def explore(self, budget_bytes: int) -> None:
        """Fills the bench with everything that is worth measuring for a budget by quick measurements.

        Levers go by their number of micro-batches, and within it by what the solver expects of them. More
        micro-batches never make a step faster, so once a plan is found that beats the plain step under a
        number, no higher one is tried.
        """
        layout = Layout(graph=self.graph, blocks=self.bench.blocks)
        row = row_of_blocks(layout, self.bench.seconds(self.graph))
        if self.options is None:
            self.options = self._options(row)
        options, self.budget_bytes = self.options, budget_bytes
        best, done = float("inf"), 0
        found = self._levers()
        for _, group in itertools.groupby(found, key=lambda lever: lever.micro_batches):
            made = [self._case(row, options, lever) for lever in group]
            cases = [self._expected(case) for case in made if case is not None]
            for case in sorted(cases, key=lambda c: c.expected_seconds):
                self.search.progress("plans", done, len(found))
                done += 1
                best = min(best, self._explore_lever(row, case, best))
            if best <= min((case.base_seconds for case in cases), default=0.0):
                break
        self.search.progress("plans", len(found), len(found))

    def _options(self, row: Row) -> tuple[dict[tuple[str, ...], Option], ...]:
        """All options, measured in captured steps that mix them."""
        wanted = wanted_saves(row, limit=OPTIONS_PER_BLOCK)
        schedules = mixes(row, wanted)[:MOST_MIXES]
        captured = []
        for number, schedule in enumerate(schedules):
            self.search.progress("options", number, len(schedules))
            graph = self._graph(self.bench.techniques(NO_LEVER, schedule))
            if graph is not None:
                captured.append((schedule, graph))
        return measured_options(row, captured, self.bench.seconds)

    def _graph(self, techniques: Sequence[Settings]) -> StepGraph | None:
        """The captured step with techniques; None, and a note, where the model cannot run with them."""
        try:
            return self.search.oracle.graph(techniques)
        except (WorkloadFailed, UsageError) as failure:
            names = ", ".join(dict.fromkeys(str(settings["technique"]) for settings in techniques))
            self.search.notes.append(f"{names} cannot be used on this model: {failure}")
            return None

    def _levers(self) -> tuple[Lever, ...]:
        return levers(
            self.search.allow,
            samples=self.facts.samples,
            chunked_loss=self.facts.chunked_loss,
            micro_batching=self.facts.micro_batching,
            implementations=self.facts.implementations,
        )

    def _case(
        self, row: Row, options: Sequence[dict[tuple[str, ...], Option]], lever: Lever
    ) -> LeverProblem | None:
        graph = self.graph if lever.is_none else self._graph(lever.settings)
        if graph is None:
            return None
        layout = Layout(graph=graph, blocks=row.blocks, passes=lever.micro_batches)
        return LeverProblem(
            lever=lever,
            problem=make_problem(row, layout, options),
            base_seconds=sum(self.bench.seconds(graph)),
        )

    def _expected(self, case: LeverProblem) -> LeverProblem:
        """The case with what the allocator reserves over the solver's sum, and the seconds to expect within
        the budget."""
        plain = self._plain_under(case)
        own_sum = case.problem.peak_bytes([0] * len(case.problem.blocks))
        overhead = max(plain.peaks.reserved_bytes - own_sum, 0)
        if self._fits(plain):
            return replace(case, overhead_bytes=overhead, expected_seconds=case.base_seconds)
        solution = solve(case.problem, self.budget_bytes - overhead)
        expected = float("inf") if solution is None else case.base_seconds + solution.recompute_seconds
        return replace(case, overhead_bytes=overhead, expected_seconds=expected)

    def _plain_under(self, case: LeverProblem) -> Try:
        name = f"plain, {case.lever.name}" if case.lever.name else "plain"
        return self.bench.evaluate(name, case.lever, self.plain.schedule, case.base_seconds, named=True)

    def _explore_lever(self, row: Row, case: LeverProblem, best: float) -> float:
        """Tries named schedules, solved plans and their neighbours under one lever; the seconds of the best
        that fits.

        Only what can beat ``best`` is run; without any lever all named schedules are, for the picture.
        """
        tried = [self._plain_under(case)]
        if row.blocks and not self._fits(tried[0]):
            tried += self._named(row, case, best)
            refiner = Refiner(self.bench, case, self.budget_bytes)
            if case.expected_seconds < best:
                tried += refiner.tighten()
            if not any(map(self._fits, tried)) and best == float("inf"):
                tried.append(refiner.least())
            if case.lever.is_none:
                refiner.sweep(FRONT_POINTS)
            fastest = min(filter(self._fits, tried), key=_by_seconds, default=None)
            if fastest is not None and fastest.seconds < best:
                tried += refiner.improve(fastest, LOCAL_STEPS)
        return min((t.seconds for t in tried if self._fits(t)), default=float("inf"))

    def _named(self, row: Row, case: LeverProblem, best: float) -> list[Try]:
        tried = []
        for name, schedule in named_schedules(row.works).items():
            choice = choice_of(case.problem, schedule)
            if choice is None:
                continue
            seconds = case.base_seconds + case.problem.recompute_seconds(choice)
            hopeless = case.problem.peak_bytes(choice) > self.budget_bytes or seconds >= best
            if hopeless and not case.lever.is_none:
                continue
            label = f"{name}, {case.lever.name}" if case.lever.name else name
            tried.append(self.bench.evaluate(label, case.lever, schedule, seconds, named=True))
        return tried

    def _fits(self, tried: Try) -> bool:
        return tried.peaks.failure is None and tried.peaks.reserved_bytes <= self.budget_bytes


def recompute_percent(figures: StepFigures, plain: StepFigures) -> float:
    """How much longer a step takes than the plain one, in percent of the plain one; 0 where it is faster."""
    return max(100.0 * (figures.step_seconds / plain.step_seconds - 1.0), 0.0)


def _by_seconds(tried: Try) -> tuple[float, int, str]:
    """Fastest first; of equals the one with fewer settings, then any fixed order."""
    return (tried.seconds, len(tried.techniques), tried.key)


def _reserved(tried: Try) -> int:
    assert tried.final is not None
    return tried.final.figures.peak_reserved_bytes
