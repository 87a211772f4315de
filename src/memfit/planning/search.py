"""The search: measure the options, solve under each lever, run what comes out, and take the fastest plan that really fits.

    plain step → options measured in captured steps → for each lever: named schedules, solve → run → tighten, local search
    → the fastest candidates again in processes of their own, on reserved bytes → the first that fits the budget

Deterministic: the same workload, GPU, budget and versions give the same plan. Only wall time is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.planning.bench import Bench, Final, ModelFacts, Oracle, Try
from memfit.planning.figures import StepFigures
from memfit.planning.layout import Layout, ordered_blocks
from memfit.planning.problem import Option
from memfit.planning.problems import (
    Row,
    make_problem,
    measured_options,
    mixes,
    row_of_blocks,
    schedule_seconds,
    wanted_saves,
)
from memfit.planning.refine import LeverProblem, Refiner
from memfit.planning.schedules import NO_LEVER, Lever, levers, named_schedules
from memfit.core.exactness import Exactness

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: called as the search goes on."""

OPTIONS_PER_BLOCK = 12
MOST_MIXES = 10
LOCAL_STEPS = 16
FINALISTS = 12
OPTIMISM = 0.002
"""A fresh process may reserve this much less than the quick measurement says, so such plans are tried as well."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found: ``chosen`` is None when nothing fits, and ``least`` then needs the least of all tried."""

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
        plain = self.oracle.final((), trace="plain")
        facts = self.oracle.facts()
        graph = self.oracle.graph(())
        blocks = ordered_blocks(graph, facts.blocks)
        bench = Bench(self.oracle, self.gpu, blocks)
        plain_try = bench.evaluate(
            "plain", NO_LEVER, (None,) * len(blocks), sum(bench.seconds(graph)), named=True
        )
        self.progress("plain step", 1, 1)
        if plain.figures.peak_reserved_bytes > self.budget_bytes:
            _Session(self, bench, facts, graph, plain_try).explore()
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
        """The fastest plan that fits, by processes of their own; the quick peaks say only which to ask first."""
        asked = 0
        hopeful = self.budget_bytes * (1 + OPTIMISM)
        for tried in sorted(bench.tries.values(), key=_by_seconds):
            if tried.peaks.failure is not None or tried.peaks.reserved_bytes > hopeful:
                continue
            self.progress("finalists", asked, FINALISTS)
            final = bench.finish(tried)
            asked += 1
            if final.final is not None and final.final.figures.peak_reserved_bytes <= self.budget_bytes:
                self.progress("finalists", FINALISTS, FINALISTS)
                return final
        return None

    def _least(self, bench: Bench) -> Try | None:
        """Of the plans that reserve least, the one that needs least in a process of its own."""
        possible = [t for t in bench.tries.values() if t.peaks.failure is None]
        nearest = sorted(possible, key=lambda t: (t.peaks.reserved_bytes, t.key))[:3]
        finals = [bench.finish(t) for t in nearest]
        return min(finals, key=_reserved, default=None)

    def _best_named(self, bench: Bench, chosen: Try | None) -> Try | None:
        """The fastest named schedule that fits in a process of its own."""
        if chosen is None:
            return None
        hopeful = self.budget_bytes * (1 + OPTIMISM)
        named = [t for t in bench.tries.values() if t.named and t.peaks.failure is None]
        for tried in sorted(named, key=_by_seconds):
            if tried.peaks.reserved_bytes <= hopeful and _reserved(bench.finish(tried)) <= self.budget_bytes:
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

    def explore(self) -> None:
        """Fills the bench with everything that is worth measuring."""
        layout = Layout(graph=self.graph, blocks=self.bench.blocks)
        row = row_of_blocks(layout, self.bench.seconds(self.graph))
        options = self._options(row)
        cases = list(self._levers())
        best = float("inf")
        for number, lever in enumerate(cases):
            self.search.progress("plans", number, len(cases))
            case = self._case(row, options, lever)
            if case.base_seconds >= best:
                continue
            best = min(best, self._explore_lever(row, options, case))
        self.search.progress("plans", len(cases), len(cases))

    def _options(self, row: Row) -> tuple[dict[tuple[str, ...], Option], ...]:
        """All options, measured in captured steps that mix them."""
        wanted = wanted_saves(row, limit=OPTIONS_PER_BLOCK)
        schedules = mixes(row, wanted)[:MOST_MIXES]
        captured = []
        for number, schedule in enumerate(schedules):
            self.search.progress("options", number, len(schedules))
            captured.append((schedule, self.search.oracle.graph(self.bench.techniques(NO_LEVER, schedule))))
        return measured_options(row, captured, self.bench.seconds)

    def _levers(self) -> Iterator[Lever]:
        """Levers to look at, the least intrusive first: fewest micro-batches, then fewest settings."""
        found = levers(
            self.search.allow,
            samples=self.facts.samples,
            chunked_loss=self.facts.chunked_loss,
            micro_batching=self.facts.micro_batching,
            implementations=self.facts.implementations,
        )
        yield from sorted(found, key=lambda lever: (lever.micro_batches, len(lever.settings)))

    def _case(self, row: Row, options: Sequence[dict[tuple[str, ...], Option]], lever: Lever) -> LeverProblem:
        graph = self.graph if lever.is_none else self.search.oracle.graph(lever.settings)
        layout = Layout(graph=graph, blocks=row.blocks, passes=lever.micro_batches)
        return LeverProblem(
            lever=lever,
            problem=make_problem(row, layout, options),
            base_seconds=sum(self.bench.seconds(graph)),
        )

    def _explore_lever(
        self, row: Row, options: Sequence[dict[tuple[str, ...], Option]], case: LeverProblem
    ) -> float:
        """Tries named schedules, solved plans and their neighbours under one lever; the seconds of the best that fits."""
        tried = [self.bench.evaluate("plain", case.lever, self.plain.schedule, case.base_seconds, named=True)]
        tried += self._named(row, options, case)
        if row.blocks and not self._fits(tried[0]):
            refiner = Refiner(self.bench, case, self.search.budget_bytes)
            solved = refiner.tighten(self._first_allowance(case, tried[0]))
            tried += [*solved, refiner.least()]
            best = min(filter(self._fits, tried), key=_by_seconds, default=None)
            if best is not None:
                tried += refiner.improve(best, LOCAL_STEPS)
        return min((t.seconds for t in tried if self._fits(t)), default=float("inf"))

    def _named(
        self, row: Row, options: Sequence[dict[tuple[str, ...], Option]], case: LeverProblem
    ) -> list[Try]:
        tried = []
        for name, schedule in named_schedules(row.works).items():
            again = schedule_seconds(row, options, schedule)
            if again is not None:
                label = f"{name}, {case.lever.name}" if case.lever.name else name
                tried.append(
                    self.bench.evaluate(label, case.lever, schedule, case.base_seconds + again, named=True)
                )
        return tried

    def _first_allowance(self, case: LeverProblem, plain: Try) -> int:
        """The budget in the solver's own sums: less what the plain step reserves over its sum."""
        own_sum = case.problem.peak_bytes([_plain_number(options) for options in case.problem.option_table()])
        return self.search.budget_bytes - max(plain.peaks.reserved_bytes - own_sum, 0)

    def _fits(self, tried: Try) -> bool:
        return tried.peaks.failure is None and tried.peaks.reserved_bytes <= self.search.budget_bytes


def recompute_percent(figures: StepFigures, plain: StepFigures) -> float:
    """How much longer a step takes than the plain one, in percent of the plain one; 0 where it is faster."""
    return max(100.0 * (figures.step_seconds / plain.step_seconds - 1.0), 0.0)


def _plain_number(options: Sequence[Option]) -> int:
    """The plain option, or what keeps most where plain was beaten."""
    return next((n for n, o in enumerate(options) if o.is_plain), len(options) - 1)


def _by_seconds(tried: Try) -> tuple[float, int, str]:
    """Fastest first; of equals the one with fewer settings, then any fixed order."""
    return (tried.seconds, len(tried.techniques), tried.key)


def _reserved(tried: Try) -> int:
    assert tried.final is not None
    return tried.final.figures.peak_reserved_bytes
