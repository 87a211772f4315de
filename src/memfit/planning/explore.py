"""The exploring part of a search: which plans are run at all.

options measured in captured steps → for each lever: named schedules, solve → run → tighten, neighbours
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memfit.capture.graph import StepGraph
from memfit.core.errors import UsageError, WorkloadFailed
from memfit.core.exactness import Exactness
from memfit.planning.bench import Bench, ModelFacts, Try, by_seconds, settings_key
from memfit.planning.drop_search import DropSearch, program_of
from memfit.planning.drops import DropProgram
from memfit.planning.figures import Settings
from memfit.planning.layout import Layout
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
LOCAL_STEPS = 8
FRONT_POINTS = 4
"""Plans for other budgets that are run for the picture of the time-memory front."""


@dataclass(kw_only=True)
class Explorer:
    """Fills a bench with plans worth measuring.

    Args:
        bench: where they are run.
        facts: of the model.
        graph: the captured plain step.
        plain: the plain step on the bench.
        allow: how far results may move.
        progress: told as it goes on.
        notes: gets what could not be tried, in words.
        local_steps: how many neighbours of a lever's best plan are run.
        all_named: run known schedules under a lever even where a plan under it beats them.
    """

    bench: Bench
    facts: ModelFacts
    graph: StepGraph
    plain: Try
    allow: Exactness
    progress: Progress
    notes: list[str]
    local_steps: int = LOCAL_STEPS
    all_named: bool = False
    _budget_bytes: int = field(default=0, init=False)
    _graphs: dict[str, StepGraph | None] = field(default_factory=dict, init=False)
    _programs: dict[str, DropProgram] = field(default_factory=dict, init=False)
    _drop_searches: dict[str, DropSearch] = field(default_factory=dict, init=False)
    _options: tuple[dict[tuple[str, ...], Option], ...] | None = field(default=None, init=False)

    def explore(self, budget_bytes: int) -> None:
        """Fills the bench with everything that is worth measuring for a budget by quick measurements.

        Levers go by their number of micro-batches, and within it by what the solver expects of them. More
        micro-batches never make a step faster, so once a plan is found that beats the plain step under a
        number, no higher one is tried.
        """
        layout = Layout(graph=self.graph, blocks=self.bench.blocks)
        row = row_of_blocks(layout, self.bench.seconds(self.graph))
        options, self._budget_bytes = self.options(row), budget_bytes
        best, done = float("inf"), 0
        found = self._levers()
        for _, group in itertools.groupby(found, key=lambda lever: lever.micro_batches):
            made = [self._case(row, options, lever) for lever in group]
            cases = [self._expected(case) for case in made if case is not None]
            for case in sorted(cases, key=lambda c: c.expected_seconds):
                self.progress("plans", done, len(found))
                done += 1
                best = min(best, self._explore_lever(row, case, best))
            if best <= min((case.base_seconds for case in cases), default=0.0):
                break
        self.progress("plans", len(found), len(found))

    def options(self, row: Row) -> tuple[dict[tuple[str, ...], Option], ...]:
        """All options of each class, measured once."""
        if self._options is None:
            known_only = self.facts.rematerialization is not None  # single operators leave no use for others
            self._options = self.measured(row, limit=0 if known_only else OPTIONS_PER_BLOCK)
        return self._options

    def measured(self, row: Row, *, limit: int) -> tuple[dict[tuple[str, ...], Option], ...]:
        """Known ways to keep parts of a block and up to ``limit`` others, by steps that mix them."""
        wanted = wanted_saves(row, limit=limit)
        schedules = mixes(row, wanted)[:MOST_MIXES]
        captured = []
        for number, schedule in enumerate(schedules):
            self.progress("options", number, len(schedules))
            graph = self._graph(self.bench.techniques(NO_LEVER, schedule))
            if graph is not None:
                captured.append((schedule, graph))
        return measured_options(row, captured, self.bench.seconds)

    def _graph(self, techniques: Sequence[Settings]) -> StepGraph | None:
        """The captured step with techniques; None, and a note, where the model cannot run with them."""
        key = settings_key(techniques)
        if key in self._graphs:
            return self._graphs[key]
        self._graphs[key] = self._captured(techniques) if techniques else self.graph
        return self._graphs[key]

    def _captured(self, techniques: Sequence[Settings]) -> StepGraph | None:
        try:
            return self.bench.oracle.graph(techniques)
        except (WorkloadFailed, UsageError) as failure:
            names = ", ".join(dict.fromkeys(str(settings["technique"]) for settings in techniques))
            self.notes.append(f"{names} cannot be used on this model: {failure}")
            return None

    @property
    def lives(self) -> dict[int, int]:
        """How long Python holds results of the plain step's forward pass, where that mattered."""
        program = self._programs.get(settings_key(()))
        return {} if program is None else program.lives_in_python()

    def _levers(self) -> tuple[Lever, ...]:
        return levers(
            self.allow,
            samples=self.facts.samples,
            chunked_loss=self.facts.chunked_loss,
            micro_batching=self.facts.micro_batching,
            implementations=self.facts.implementations,
            expandable_segments=self.facts.expandable_segments,
        )

    def _case(
        self, row: Row, options: Sequence[dict[tuple[str, ...], Option]], lever: Lever
    ) -> LeverProblem | None:
        graph = self._graph(lever.step_settings)
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
        drops = self._drops(case)
        if drops is not None:
            own = plain.peaks.reserved_bytes - drops.program.step.graph.peak_bytes
            expected = drops.expected(max(own, 0))
            return replace(case, overhead_bytes=overhead, expected_seconds=expected)
        solution = solve(case.problem, self._budget_bytes - overhead)
        expected = float("inf") if solution is None else case.base_seconds + solution.recompute_seconds
        return replace(case, overhead_bytes=overhead, expected_seconds=expected)

    def _drops(self, case: LeverProblem) -> DropSearch | None:
        """The search over single operators; None where the model cannot run so."""
        if self.facts.rematerialization is None:
            return None
        key, step_key = settings_key(case.lever.settings), settings_key(case.lever.step_settings)
        graph = self._graph(case.lever.step_settings)
        assert graph is not None, "a case has a graph"
        if step_key not in self._programs:
            self._programs[step_key] = program_of(
                graph, self.bench.blocks, self.bench.seconds(graph), case.lever.micro_batches
            )
        if key not in self._drop_searches:
            self._drop_searches[key] = DropSearch(
                self.bench, self._plain_under(case), case.base_seconds, self._programs[step_key], self._graph
            )
        search = self._drop_searches[key]
        search.budget_bytes = self._budget_bytes
        return search

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
            known = self._named(row, case, best) if self.all_named else []
            drops = self._drops(case)
            if drops is not None:
                tried += self._dropping(drops, tried[0], case, best)
            if not self.all_named:
                known = self._named(row, case, min([best, *(t.seconds for t in tried if self._fits(t))]))
            tried += known
            if drops is None or not any(t.peaks.failure is None for t in tried if t.name == "planned"):
                tried += self._choosing(case, tried, best)
        return min((t.seconds for t in tried if self._fits(t)), default=float("inf"))

    def _dropping(self, drops: DropSearch, plain: Try, case: LeverProblem, best: float) -> list[Try]:
        """Plans operator by operator."""
        tried: list[Try] = []
        overhead = max(plain.peaks.reserved_bytes - drops.program.step.graph.peak_bytes, 0)
        if case.expected_seconds < best:
            tried += drops.tighten(overhead)
        if not any(map(self._fits, tried)) and best == float("inf"):
            tried += drops.least()
        if case.lever.is_none:
            drops.sweep(FRONT_POINTS // 2)
        fastest = min(filter(self._fits, tried), key=by_seconds, default=None)
        if fastest is not None and fastest.seconds < best:
            tried += drops.improve(fastest, self.local_steps)
        return tried

    def _choosing(self, case: LeverProblem, tried: Sequence[Try], best: float) -> list[Try]:
        """Plans block by block, from options as measured."""
        refiner, more = Refiner(self.bench, case, self._budget_bytes), []
        if case.expected_seconds < best:
            more += refiner.tighten()
        if not any(map(self._fits, (*tried, *more))) and best == float("inf"):
            more.append(refiner.least())
        if case.lever.is_none:
            refiner.sweep(FRONT_POINTS)
        fastest = min(filter(self._fits, (*tried, *more)), key=by_seconds, default=None)
        if fastest is not None and fastest.seconds < best:
            more += refiner.improve(fastest, self.local_steps)
        return more

    def _named(self, row: Row, case: LeverProblem, best: float) -> list[Try]:
        wanted = []
        for name, schedule in named_schedules(row.works).items():
            choice = choice_of(case.problem, schedule)
            if choice is None:
                continue
            seconds = case.base_seconds + case.problem.recompute_seconds(choice)
            hopeless = case.problem.peak_bytes(choice) > self._budget_bytes or seconds >= best
            if hopeless and not case.lever.is_none:
                continue
            label = f"{name}, {case.lever.name}" if case.lever.name else name
            wanted.append((label, schedule, seconds))
        self.bench.evaluate_ahead([(case.lever, schedule) for _, schedule, _ in wanted])
        return [self.bench.evaluate(label, case.lever, *plan, named=True) for label, *plan in wanted]

    def _fits(self, tried: Try) -> bool:
        return tried.peaks.failure is None and tried.peaks.reserved_bytes <= self._budget_bytes
