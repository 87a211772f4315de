"""The table of analyses: what `memfit analyze` runs over a job. A new one is one file and one row here.

An analysis is a function from a `Subject` to a `Result`. Its sentences, tables and figure appear on the
terminal, in the JSON and on the page without another line of code. `register_analysis` adds one for this
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from memfit.analysis.bottleneck import detect_bottlenecks
from memfit.analysis.capturing import PLAIN_GPU, opened_oracle
from memfit.analysis.memory import analyze_memory
from memfit.analysis.performance import analyze_performance
from memfit.analysis.recommend import OptimizationRecommender
from memfit.analysis.results import Result
from memfit.analysis.subject import Subject, graph_of
from memfit.core.devices import find_gpu
from memfit.core.errors import UsageError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A row of the table.

    Attributes:
        help: what it says, in one line.
        run: makes the result.
        lacks: why it cannot be made of a subject; None where it can.
    """

    help: str
    run: Callable[[Subject, Progress], Result]
    lacks: Callable[[Subject], str | None] = lambda subject: None


def _lacks_memory(subject: Subject) -> str | None:
    known = subject.trace is not None or subject.workload is not None
    return None if known else "the sources tell nothing of allocations"


def _lacks_roofline(subject: Subject) -> str | None:
    if subject.graph is None and subject.workload is None:
        return "needs a captured step, or a workload"
    return None if subject.gpu is not None else "needs a GPU: --gpu NAME"


def _lacks_trials(subject: Subject) -> str | None:
    if subject.workload is None:
        return "needs a workload, whose step it can try"
    return None if subject.gpu is not None else "needs a GPU: --gpu NAME"


def _performance(subject: Subject, progress: Progress) -> Result:
    assert subject.gpu is not None
    return analyze_performance(graph_of(subject), subject.gpu, subject.times, name=subject.name)


def _recommendations(subject: Subject, progress: Progress) -> Result:
    return OptimizationRecommender(subject, allow=subject.allow).recommend(progress=progress)


ANALYSES: dict[str, Analysis] = {
    "memory": Analysis(
        help="Where memory goes: the peak, fragmentation, leaks, lifetimes.",
        run=lambda subject, progress: analyze_memory(subject),
        lacks=_lacks_memory,
    ),
    "performance": Analysis(
        help="Each operator against the GPU's roofline.", run=_performance, lacks=_lacks_roofline
    ),
    "bottleneck": Analysis(
        help="What limits the step.", run=lambda subject, progress: detect_bottlenecks(subject)
    ),
    "recommendations": Analysis(
        help="Techniques tried on the step, ranked by saving and cost.",
        run=_recommendations,
        lacks=_lacks_trials,
    ),
}
"""Every analysis by name, in the order in which they are shown."""


def register_analysis(name: str, analysis: Analysis) -> None:
    """Add an analysis of yours, for this process.

    Raises:
        UsageError: it is no `Analysis`, or the name is another one's.
    """
    if not isinstance(analysis, Analysis):
        raise UsageError(f"register_analysis({name!r}): give an Analysis, not {type(analysis).__name__}")
    if ANALYSES.get(name, analysis) is not analysis:
        raise UsageError(f"register_analysis({name!r}): there is one of this name; choose another")
    ANALYSES[name] = analysis


@dataclass(frozen=True, kw_only=True)
class Analysed:
    """What the analyses gave.

    Attributes:
        subject: of what, its step captured where that was needed.
        results: by name, in the table's order.
        skipped: name → why it was not made.
    """

    subject: Subject
    results: Mapping[str, Result]
    skipped: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        gpu = self.subject.gpu
        return {
            "schema_version": 1,
            "name": self.subject.name,
            "gpu": None if gpu is None else gpu.key,
            "sources": list(self.subject.kinds()),
            "analyses": {name: result.to_json() for name, result in self.results.items()},
            "skipped": dict(self.skipped),
        }


def analyze(subject: Subject, *, only: Sequence[str] = (), progress: Progress | None = None) -> Analysed:
    """Run the analyses that a subject has something for.

    Args:
        only: names of those to run; none: all. One that is named and cannot be made is an error.
        progress: called with ``(what, done, total)``.

    Raises:
        UsageError: an unknown name, or nothing can be made of the subject.
    """
    for name in only:
        if name not in ANALYSES:
            raise UsageError(f"no analysis is called {name!r}; there are {', '.join(ANALYSES)}")
    show = progress or (lambda what, done, total: None)
    chosen = {name: row for name, row in ANALYSES.items() if not only or name in only}
    skipped = {name: why for name, row in chosen.items() if (why := row.lacks(subject)) is not None}
    if len(skipped) == len(chosen):
        raise UsageError("; ".join(f"{name}: {why}" for name, why in skipped.items()))
    if only and skipped:
        raise UsageError("; ".join(f"{name} {why}" for name, why in skipped.items()))
    results: dict[str, Result] = {}
    with ExitStack() as stack:
        if subject.workload is not None:
            show("capturing the step", 0, len(chosen))
            gpu = find_gpu(PLAIN_GPU) if subject.gpu is None else subject.gpu
            oracle = stack.enter_context(opened_oracle(subject.workload, gpu))
            subject = replace(subject, oracle=oracle).with_graph()
        for done, (name, row) in enumerate(chosen.items()):
            if name not in skipped:
                show(name, done, len(chosen))
                results[name] = row.run(subject, show)
    return Analysed(subject=replace(subject, oracle=None), results=results, skipped=skipped)
