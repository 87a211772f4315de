"""Compiled plans: PyTorch's own cuts of the compiler's graph, and memfit's for a peak.

    the step compiled and nothing run again → one trace, on which cuts are replayed in thought
    → the fastest of PyTorch's budgets that may fit; memfit's cut for what is left of the budget → run,
    tighten → the same two compiled with fusion, where rounding otherwise is allowed

Cuts for the kernels of the plain model (``aot_eager``) are exact, and their seconds are those of the plain
step and of what runs again, operator by operator: they compare with any other plan. With fusion
(``inductor``) groups of operators are priced, and what is run again is told in parts of the compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from memfit.core.errors import MemfitError
from memfit.core.exactness import Exactness, allowed
from memfit.planning.bench import Bench, Try
from memfit.planning.figures import Settings
from memfit.planning.schedules import Lever

BUDGETS = (0.9, 0.75, 0.5, 0.4, 0.25, 0.1)
"""PyTorch's, beside 1 (nothing heavy is run again). At 0 it keeps next to nothing, and needs more than at
0.1."""
ROUNDS = 4
LEAST_STEP_SHARE = 0.01
"""By how much of itself the peak asked for changes at least from one round to the next."""
TIGHT_SHARE = 0.97
"""A plan that reserves this part of the budget is not improved further."""
LUCK_SHARE = 0.02
"""By how much a cut may exceed the budget in thought and still be run."""

EXPANDABLE: Settings = {"technique": "allocator_settings", "expandable_segments": True}

Progress = Callable[[str, int, int], None]
Figures = Mapping[str, Any]
"""What `memfit.planning.evaluate_compiled.CompiledSession` says of a cut."""


class Remote(Protocol):
    """The session in which cuts are replayed."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls ``method``."""
        ...


class CompilingOracle(Protocol):
    """An oracle that can open the session."""

    def open(self, cls: str, **arguments: Any) -> AbstractContextManager[Remote]:
        """Builds ``"package.module:Class"`` in a process of its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compile: ``traced`` is the back-end of the same graph that runs operator by operator."""

    backend: str
    traced: str
    exactness: Exactness

    @property
    def is_fused(self) -> bool:
        """Whether operators are fused: their seconds are then those of groups."""
        return self.backend == "inductor"


WAYS = (
    Way(backend="aot_eager", traced="aot_eager", exactness="exact"),
    Way(backend="inductor", traced="aot_eager_decomp_partition", exactness="reordered"),
)


@dataclass(kw_only=True)
class CompiledExplorer:
    """Puts compiled plans on a bench.

    Args:
        bench: where they are run.
        plain: the plain step on the bench.
        allow: how far results may move.
        notes: gets what could not be tried, in words.
    """

    bench: Bench
    plain: Try
    allow: Exactness
    progress: Progress
    notes: list[str]

    @property
    def _oracle(self) -> CompilingOracle:
        return cast("CompilingOracle", self.bench.oracle)  # the dry run's is one

    def explore(self, budget_bytes: int) -> list[Try]:
        """Runs the compiled plans that are worth it. What cannot be compiled is a note: other plans stay."""
        if self.bench.oracle.engine != "dryrun":
            self.notes.append("compiled plans need the dry run: none was tried")
            return []
        tried: list[Try] = []
        ways = [way for way in WAYS if allowed(way.exactness, self.allow)]
        for number, way in enumerate(ways):
            self.progress("compiled plans", number, len(ways))
            try:
                tried += self._explore(way, budget_bytes)
            except MemfitError as failure:
                self.notes.append(f"no compiled plan ({way.backend}): {failure}")
        self.progress("compiled plans", len(ways), len(ways))
        return tried

    def _explore(self, way: Way, budget_bytes: int) -> list[Try]:
        with self._oracle.open(
            "memfit.planning.evaluate_compiled:CompiledSession", backend=way.traced, budgets=[1.0, *BUDGETS]
        ) as session:
            search = _Search(self, session, way, budget_bytes)
            return search.run()

    def evaluate(
        self, way: Way, setting: Mapping[str, float], figures: Figures, whole: Figures, *, expandable: bool
    ) -> Try:
        """Runs one cut, with the default allocator or with expandable segments."""
        settings = [self.settings(way.backend, setting), *([EXPANDABLE] if expandable else [])]
        name = f"{_name(way, setting)}{', expandable segments' if expandable else ''}"
        lever = Lever(name=name, settings=tuple(settings), exactness=way.exactness)
        if way.is_fused:
            more = figures["fused_seconds"] - whole["unfused_seconds"]
        else:
            more = figures["recompute_seconds"]
        return self.bench.evaluate(
            lever.name, lever, self.plain.schedule, self.plain.seconds + more, named="budget" in setting
        )

    def settings(self, backend: str, setting: Mapping[str, float]) -> Settings:
        """The technique's settings for one cut."""
        return {
            "technique": "compiled_partition",
            "backend": backend,
            "gpu": self.bench.gpu.key,
            **setting,
        }


class _Search:
    """One way to compile, for one budget."""

    def __init__(self, explorer: CompiledExplorer, session: Remote, way: Way, budget_bytes: int) -> None:
        self.explorer, self.session, self.way, self.budget_bytes = explorer, session, way, budget_bytes
        self.whole: Figures = session.call("whole")
        self.overhead_bytes = 0

    def run(self) -> list[Try]:
        """The step compiled as it is; when that does not fit, PyTorch's budgets and memfit's cut."""
        if not self.whole["graphs"]:
            self.explorer.notes.append("nothing of this model is compiled: its own forward is not called")
            return []
        if self.whole["graphs"] > 1:
            self.explorer.notes.append(
                f"the compiler breaks this model into {self.whole['graphs']} graphs, each cut by itself"
            )
        default = self.session.call("budget", budget=1.0)
        first = self._try({"budget": 1.0}, default)
        if first.peaks.failure is not None:
            self.explorer.notes.append(f"no compiled plan ({self.way.backend}): {first.peaks.failure}")
            return [first]
        self.overhead_bytes = first.peaks.reserved_bytes - int(default["peak_bytes"])
        if self._fits(first):
            return [first]
        return [first, *self._budgets(), *self._tighten()]

    def _try(self, setting: Mapping[str, float], figures: Figures) -> Try:
        """Runs a cut; where only fragmentation keeps it from fitting, with expandable segments too."""
        tried = self.explorer.evaluate(self.way, setting, figures, self.whole, expandable=False)
        if self._fits(tried) or tried.peaks.failure or tried.peaks.allocated_bytes > self.budget_bytes:
            return tried
        other = self.explorer.evaluate(self.way, setting, figures, self.whole, expandable=True)
        better = other.peaks.failure is None and other.peaks.reserved_bytes < tried.peaks.reserved_bytes
        return other if better else tried

    def _fits(self, tried: Try) -> bool:
        return tried.fits(self.budget_bytes)

    def _budgets(self) -> Iterator[Try]:
        """PyTorch's cuts that may fit, fastest first, until one does."""
        figures = {budget: self.session.call("budget", budget=budget) for budget in BUDGETS}
        most = self.budget_bytes * (1 + LUCK_SHARE) - self.overhead_bytes
        hopeful = [budget for budget in BUDGETS if figures[budget]["peak_bytes"] <= most]
        for budget in sorted(hopeful, key=lambda b: (self._seconds(figures[b]), -b)):
            tried = self._try({"budget": budget}, figures[budget])
            yield tried
            if self._fits(tried):
                return

    def _seconds(self, figures: Figures) -> float:
        return float(figures["fused_seconds" if self.way.is_fused else "recompute_seconds"])

    def _tighten(self) -> Iterator[Try]:
        """memfit's cut for what is left of the budget, asked for leaner or richer by what it really
        reserves."""
        whole, failing = self.whole["peak_bytes"], 0.0
        wanted = (self.budget_bytes - self.overhead_bytes) / whole
        for _ in range(ROUNDS):
            peak = round(min(wanted, 1.0), 4)
            if peak <= 0:
                return
            figures = self.session.call("peak", peak=peak)
            tried = self._try({"peak": peak}, figures)
            yield tried
            if not figures["reached"]:
                return
            off = (self.budget_bytes - tried.peaks.reserved_bytes) / whole
            step = max(abs(off), LEAST_STEP_SHARE * peak)
            if not self._fits(tried):
                failing = peak
                wanted = peak - step
            elif self._is_tight(tried) or (failing and failing - peak <= LEAST_STEP_SHARE * peak):
                return
            else:
                wanted = min(peak + step, (peak + failing) / 2 if failing else 1.0)

    def _is_tight(self, tried: Try) -> bool:
        return tried.peaks.reserved_bytes >= TIGHT_SHARE * self.budget_bytes


def fused_note(chosen: Try | None, tries: Iterable[Try]) -> list[str]:
    """What runs again in a plan with fusion, in parts of the compiled step: its time has other terms than
    that of plans without."""
    plain = next((t for t in tries if _fused_budget(t) == 1.0), None)
    if chosen is None or plain is None or _fused_budget(chosen) is None:
        return []
    percent = max(100 * (chosen.seconds / plain.seconds - 1), 0.0)
    return [
        f"compiled with fusion: what runs again takes {percent:.1f} % of the compiled step, in predicted "
        "time; recompute_percent compares with the step that is not compiled"
    ]


def _fused_budget(tried: Try) -> float | None:
    """PyTorch's budget of a plan with fusion; 0 for memfit's cut, None for any other plan."""
    for settings in tried.techniques:
        if settings["technique"] == "compiled_partition" and settings["backend"] == "inductor":
            return float(settings.get("budget", 0.0))
    return None


def _name(way: Way, setting: Mapping[str, float]) -> str:
    (key, value), *_ = setting.items()
    if key == "budget":
        return f"torch.compile, budget {value:g} ({way.backend})"
    return f"compiled, cut for {value:.0%} of the peak ({way.backend})"
