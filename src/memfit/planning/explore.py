"""The exploring part of a search: which plans are run at all.

options measured in captured steps → for each lever: named schedules, solve → run → tighten, neighbours
→ blocks offloaded, and levers of the table, where they may be faster than what was found
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memfit.capture.graph import StepGraph
from memfit.core.errors import MemfitError
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.planning.bench import Bench, ModelFacts, Try, by_seconds, settings_key
from memfit.planning.drop_search import DropSearch, program_of
from memfit.planning.drops import DropProgram
from memfit.planning.figures import Settings
from memfit.planning.layout import Layout
from memfit.planning.lever_search import MOST_RUN, Prospect, prospects, worth_a_run
from memfit.planning.offload_search import OffloadSearch
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
HOPELESS_SHARE = 1.1
"""Where every block recomputed reserves more than this of the budget, no operators are chosen."""
BLOCK_BY_BLOCK = frozenset({"memory_compression", "activation_offload", "parameter_offload"})
"""Techniques that work on whole blocks, so that what goes with them is chosen by whole blocks too."""
MOST_OFFLOADED = 3
"""Levers under which plans with offloaded blocks are run."""
HOST_SHARE = 0.5
"""Of this machine's free memory that a run may take for what a plan keeps on the host."""


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
        host_budget_bytes: host memory that a plan may use; None for no limit.
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
    host_budget_bytes: int | None = None
    _budget_bytes: int = field(default=0, init=False)
    _graphs: dict[str, StepGraph | None] = field(default_factory=dict, init=False)
    _programs: dict[str, DropProgram] = field(default_factory=dict, init=False)
    _drop_searches: dict[str, DropSearch] = field(default_factory=dict, init=False)
    _options: tuple[dict[tuple[str, ...], Option], ...] | None = field(default=None, init=False)

    def explore(self, budget_bytes: int) -> None:
        """Fills the bench with everything that is worth measuring for a budget by quick measurements.

        Levers go by their number of micro-batches, and within it by what the solver expects of them. More
        micro-batches never make a step faster, so once a plan is found that beats the plain step under a
        number, no higher one is tried. Then offloading and the levers of the table, as long as they are
        expected to be faster than what was found.
        """
        layout = Layout(graph=self.graph, blocks=self.bench.blocks)
        row = row_of_blocks(layout, self.bench.seconds(self.graph))
        options, self._budget_bytes = self.options(row), budget_bytes
        best, done = float("inf"), 0
        found, seen = self._levers(), list[LeverProblem]()
        for _, group in itertools.groupby(found, key=lambda lever: lever.micro_batches):
            made = [self._case(row, options, lever) for lever in group]
            cases = [self._expected(case) for case in made if case is not None]
            seen += cases
            for case in sorted(cases, key=lambda c: c.expected_seconds):
                self.progress("plans", done, len(found))
                done += 1
                best = min(best, self._explore_lever(row, case, best))
            if best <= min((case.base_seconds for case in cases), default=0.0):
                break
        best = self._offloading(seen, best)
        more = self._more_levers(row, options, seen, best)
        self._offloading(more, min([best, *(c.expected_seconds for c in more if c.expected_seconds < best)]))
        self.progress("plans", len(found), len(found))

    def _more_levers(
        self,
        row: Row,
        options: Sequence[dict[tuple[str, ...], Option]],
        seen: Sequence[LeverProblem],
        best: float,
    ) -> list[LeverProblem]:
        """Levers of the table on top of those tried so far; the cases that were run, with the seconds of
        their best plan."""
        steps = []
        for case in seen:
            graph = self._graph(case.lever.step_settings)
            assert graph is not None, "a case has a graph"
            steps.append((case.lever, graph, self.bench.seconds(graph)))
        found = prospects(
            steps,
            allow=self.allow,
            blocks=row.blocks,
            gpu=self.bench.gpu,
            budget_bytes=self._budget_bytes,
            best_seconds=best,
        )
        run: list[LeverProblem] = []
        for number, prospect in enumerate(worth_a_run(self._with_host(found))):
            self.progress("more levers", number, len(found))
            if len(run) >= MOST_RUN:
                break
            made = self._case(row, options, prospect.lever) if prospect.floor_seconds < best else None
            if made is None:
                continue
            seconds = float("inf")
            if not self._is_hopeless(row, made):
                seconds = self._explore_lever(row, self._expected(made), best)
                best = min(best, seconds)
            run.append(replace(made, expected_seconds=seconds))
        return run

    def _is_hopeless(self, row: Row, case: LeverProblem) -> bool:
        """Whether even every block recomputed reserves far more than the budget, or cannot run at all."""
        full: tuple[tuple[str, ...], ...] = ((),) * len(row.blocks)
        choice = choice_of(case.problem, full)
        again = 0.0 if choice is None else case.problem.recompute_seconds(choice)
        tried = self.bench.evaluate(
            f"full, {case.lever.name}", case.lever, full, case.base_seconds + again, named=True
        )
        if tried.peaks.failure is not None:
            self._note(f"{case.lever.name} cannot be used on this model: {tried.peaks.failure}")
        over = tried.peaks.reserved_bytes > HOPELESS_SHARE * self._budget_bytes
        return tried.peaks.failure is not None or over

    def _with_host(self, found: Sequence[Prospect]) -> list[Prospect]:
        """Those whose host memory is allowed, and there for their runs here."""
        limit = self.host_budget_bytes
        kept = [p for p in found if limit is None or p.lever.host_bytes <= limit]
        there = int(HOST_SHARE * _free_host_bytes())
        large = [p.lever.host_bytes for p in kept if p.lever.host_bytes > there]
        if large:
            least = format_bytes(min(large))
            self._note(
                f"{len(large)} sets of levers were not tried: their runs here take {least} "
                f"of host memory or more, of which {format_bytes(there)} may be used"
            )
        return [p for p in kept if p.lever.host_bytes <= there]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _offloading(self, cases: Sequence[LeverProblem], best: float) -> float:
        """Plans with blocks offloaded under levers that were tried, those with the least expected time
        first; the seconds of the best plan then."""
        if self.host_budget_bytes == 0:
            return best
        searches = []
        for case in cases:
            graph = self._graph(case.lever.step_settings)
            if graph is None or not case.problem.blocks or self._fits(self._plain_under(case)):
                continue
            if not BLOCK_BY_BLOCK.isdisjoint(s["technique"] for s in case.lever.settings):
                continue
            search = OffloadSearch(self.bench, case, graph, self._budget_bytes)
            searches.append((search.expected(), case.lever.micro_batches, case.lever.name, search))
        for number, (expected, _, _, search) in enumerate(sorted(searches, key=lambda row: row[:3])):
            if expected >= best or number >= MOST_OFFLOADED:
                break
            fitting = [t.seconds for t in search.tighten(best) if self._fits(t)]
            if not fitting and best < float("inf"):
                break  # the peak is elsewhere: the next lever's runs would cost more than they may bring
            best = min([best, *fitting])
        return best

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
        except MemfitError as failure:  # a package may be missing, or the host's memory too small
            names = ", ".join(dict.fromkeys(str(settings["technique"]) for settings in techniques))
            self._note(f"{names} cannot be used on this model: {failure}")
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
            base_seconds=sum(self.bench.seconds(graph)) + lever.host_seconds,
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
        whole_blocks = not BLOCK_BY_BLOCK.isdisjoint(s["technique"] for s in case.lever.settings)
        if self.facts.rematerialization is None or whole_blocks:
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
        if not self._fits(tried[0]):
            known = self._named(row, case, best) if self.all_named and row.blocks else []
            drops = self._drops(case)
            if drops is not None:
                tried += self._dropping(drops, tried[0], case, best)
            if row.blocks and not self.all_named:
                known = self._named(row, case, min([best, *(t.seconds for t in tried if self._fits(t))]))
            tried += known
            by_operator = any(t.peaks.failure is None for t in tried if t.name == "planned")
            if row.blocks and not by_operator:
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
        return [
            self.bench.evaluate(label, case.lever, schedule, seconds, named=True)
            for label, schedule, seconds in wanted
        ]

    def _fits(self, tried: Try) -> bool:
        return tried.fits(self._budget_bytes)


def _free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
