"""The search: measure the options, solve under each lever, run what comes out, and take the fastest plan that
really fits.

    plain step → options measured in captured steps
    → for each lever: named schedules, solve → run → tighten, local search
    → the fastest candidates again in processes of their own, on reserved bytes → the first that fits

Deterministic: the same workload, GPU, budget and versions give the same plan. Only wall time is not looked
at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes, format_seconds
from memfit.planning.bench import Bench, Final, ModelFacts, Oracle, Try, by_seconds
from memfit.planning.compiled import CompiledExplorer, fused_note
from memfit.planning.explore import Explorer, Progress
from memfit.planning.figures import StepFigures
from memfit.planning.layout import ordered_blocks
from memfit.planning.schedules import NO_LEVER

FINALISTS = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found: ``chosen`` is None when nothing fits, and ``least`` then needs the least of all
    tried. ``lives``: how long Python holds results, where plans had to know (`Explorer.lives`)."""

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
    lives: Mapping[int, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Search:
    """One search for one workload, GPU and budget."""

    oracle: Oracle
    gpu: GPU
    budget_bytes: int
    allow: Exactness = "exact"
    compiled: bool = False
    host_budget_bytes: int | None = None
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
        chosen, lives = None, dict[int, int]()
        if plain.figures.peak_reserved_bytes <= self.budget_bytes:
            chosen = self._choose(bench)
        else:
            explorer = Explorer(
                bench=bench,
                facts=facts,
                graph=graph,
                plain=plain_try,
                allow=self.allow,
                progress=self.progress,
                notes=self.notes,
                host_budget_bytes=self.host_budget_bytes,
            )
            explorer.explore(self.budget_bytes)
            if self.compiled:
                self._explore_compiled(bench, plain_try)
            chosen = self._choose(bench)
            surprise = self._surprise(bench)
            if chosen is None and 0 < surprise < self.budget_bytes:
                explorer.explore(self.budget_bytes - surprise)
                chosen = self._choose(bench)
            lives = explorer.lives
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
            notes=(*self.notes, *fused_note(chosen, bench.tries.values()), *host_note(chosen)),
            lives=lives,
        )

    def _explore_compiled(self, bench: Bench, plain: Try) -> None:
        explorer = CompiledExplorer(
            bench=bench, plain=plain, allow=self.allow, progress=self.progress, notes=self.notes
        )
        explorer.explore(self.budget_bytes)

    def _choose(self, bench: Bench) -> Try | None:
        """The fastest plan that fits, by processes of their own; quick peaks only say which to ask first.

        Asking goes on as long as another may be faster than the best so far by what is expected of it.
        """
        best = min(filter(self._holds, bench.tries.values()), key=by_seconds, default=None)
        hopeful = [t for t in bench.tries.values() if t.final is None and self._may_hold(t)]
        for asked, tried in enumerate(sorted(hopeful, key=by_seconds)[:FINALISTS]):
            if best is not None and by_seconds(best) <= by_seconds(tried):
                break
            self.progress("finalists", asked, FINALISTS)
            final = bench.finish(tried)
            if self._holds(final):
                best = final if best is None else min(best, final, key=by_seconds)
        self.progress("finalists", FINALISTS, FINALISTS)
        return best

    def _may_hold(self, tried: Try) -> bool:
        return tried.fits(self.budget_bytes)

    def _holds(self, tried: Try) -> bool:
        return tried.final is not None and _reserved(tried) <= self.budget_bytes

    @staticmethod
    def _surprise(bench: Bench) -> int:
        """The most that a process of its own reserved over the quick measurement of the same plan.

        None with the engines as they are; an engine without forks may be off by a little.
        """
        finals = [t for t in bench.tries.values() if t.final is not None]
        return max((_reserved(t) - t.peaks.reserved_bytes for t in finals), default=0)

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
        named = [t for t in bench.tries.values() if t.named and self._may_hold(t)]
        for tried in sorted(named, key=by_seconds):
            if self._holds(bench.finish(tried)):
                return bench.finish(tried)
        return None


def host_note(chosen: Try | None) -> list[str]:
    """What a plan asks of the host, and that the time of it was not measured."""
    if chosen is None or chosen.final is None or not chosen.final.figures.host_bytes:
        return []
    needed, shown = format_bytes(chosen.final.figures.host_bytes), format_seconds(chosen.lever.host_seconds)
    return [
        f"this plan needs {needed} of host memory; the time of its copies and steps there is predicted from "
        f"the GPU's link to the host, not measured: {shown} of the step are counted for what nothing hides"
    ]


def recompute_percent(figures: StepFigures, plain: StepFigures) -> float:
    """How much longer a step takes than the plain one, in percent of the plain one; 0 where it is faster."""
    return max(100.0 * (figures.step_seconds / plain.step_seconds - 1.0), 0.0)


def _reserved(tried: Try) -> int:
    assert tried.final is not None
    return tried.final.figures.peak_reserved_bytes
