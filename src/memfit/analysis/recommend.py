"""`OptimizationRecommender`: every technique tried on a workload, ranked by what it saves for what it costs.

Each candidate runs on the dry run (or the portable engine): peaks are what the allocator reserves, seconds
are the roofline's sum over the captured step. Savings of several techniques do not add up, since the peak
moves; so those that help are also put on together, one after another, and kept where the peak falls further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from memfit.analysis.advice import Recommendation, Recommendations, Rejection, settings_text
from memfit.analysis.candidates import candidate_settings
from memfit.analysis.capturing import opened_oracle, reference_of
from memfit.analysis.subject import Subject
from memfit.capture.costs import op_seconds
from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import MemfitError, UsageError
from memfit.core.exactness import EXACTNESS_ORDER, Exactness, allowed, checked_grade, weakest
from memfit.core.units import format_bytes
from memfit.planning.bench import Peaks
from memfit.planning.figures import Settings, StepFigures
from memfit.planning.fit import checked_budget
from memfit.planning.oracle import Engine, StepOracle
from memfit.planning.plan import Plan

LEAST_SHARE = 0.01
"""A saving below this share of the plain step's peak is none."""
FREE_PERCENT = 0.5
"""Costs below this are as good as none, when savings are weighed against them."""
MOST_TOGETHER = 5
LONGEST_REASON = 240

Progress = Callable[[str, int, int], None]


class OptimizationRecommender:
    """Tries every technique on a workload's step and ranks those that help.

    Args:
        workload: a `Workload`, or its text: ``"hf:gpt2,batch=8,seq=1024"``, ``"train.py:workload"``.
        gpu: the GPU, or its name.
        budget: what PyTorch may reserve, as bytes or text; default: what the GPU has.
        allow: how far results may move; techniques beyond that are listed with this as the reason.
        engine: ``"dryrun"``, ``"portable"``, or ``"auto"``.
        techniques: name → class of those to try; default: all of ``memfit.techniques.TECHNIQUES``.

    Examples:
        >>> recommender = OptimizationRecommender("hf:gpt2,batch=8", gpu="rtx3060-12gb")  # doctest: +SKIP
        >>> best = recommender.recommend().advice[0]                                      # doctest: +SKIP
        >>> model, optimizer = best.apply(model, optimizer)                               # doctest: +SKIP
    """

    def __init__(
        self,
        workload: Any,
        *,
        gpu: GPU | str | None = None,
        budget: int | str | None = None,
        allow: Exactness = "approximate",
        engine: Engine = "auto",
        techniques: Mapping[str, Any] | None = None,
    ) -> None:
        checked_grade(allow)
        self.subject = Subject.of(workload, gpu=gpu, budget=budget)
        if self.subject.workload is None:
            raise UsageError("recommendations are tried on the step itself: give a Workload, or its text")
        if self.subject.gpu is None:
            raise UsageError("recommendations are for a GPU: name one with gpu=, like rtx3060-12gb")
        self.allow, self.engine, self.techniques = allow, engine, techniques

    def recommend(self, *, progress: Progress | None = None) -> Recommendations:
        """Try everything; the same input gives the same advice.

        Args:
            progress: called with ``(what, done, total)`` as it goes on.

        Raises:
            WorkloadFailed: the workload's own code raised.
            CannotRunHere: an engine was asked for that this machine cannot run.
        """
        subject = self.subject
        assert subject.workload is not None and subject.gpu is not None
        spec = reference_of(subject.workload)[1]
        with ExitStack() as stack:
            oracle = subject.oracle
            if oracle is None:
                oracle = stack.enter_context(opened_oracle(subject.workload, subject.gpu, self.engine))
            budget = checked_budget(subject.budget_bytes, subject.gpu)
            trials = _Trials(oracle, subject.gpu, budget, self.allow, spec, progress or _silent)
            listed = [
                settings for group in candidate_settings(self.techniques).values() for settings in group
            ]
            return trials.run(listed)


def _silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """What trying some techniques gave."""

    techniques: tuple[Settings, ...]
    exactness: Exactness
    figures: StepFigures
    graph: StepGraph


class _Trials:
    """Runs candidates on one oracle and makes advice of them."""

    def __init__(
        self,
        oracle: StepOracle,
        gpu: GPU,
        budget_bytes: int,
        allow: Exactness,
        spec: str | None,
        progress: Progress,
    ) -> None:
        self._oracle, self._gpu, self._budget, self._allow = oracle, gpu, budget_bytes, allow
        self._spec, self._progress = spec, progress
        self._rejected: list[Rejection] = []
        self._plain = self._tried((), "exact")

    def run(self, candidates: Sequence[Settings]) -> Recommendations:
        """The advice that comes of all candidates."""
        grades = self._oracle.call(
            "memfit.analysis.trials:grades", candidates=list(candidates), graph=self._plain.graph.to_json()
        )
        known: set[str] = set()
        helpful: list[_Trial] = []
        for done, (settings, grade) in enumerate(zip(candidates, grades, strict=True)):
            self._progress(settings_text(settings), done, len(candidates))
            expected = f"{settings['technique']} {grade['exactness']} {grade.get('estimate')}"
            if grade.get("estimate") is not None and expected in known:
                continue  # the technique itself expects the same of it as of other settings
            known.add(expected)
            trial = self._judged(settings, grade, helpful)
            if trial is not None:
                helpful.append(trial)
        advice = sorted((self._advice(trial) for trial in helpful), key=_rank)
        self._progress("several together", len(candidates), len(candidates))
        together = self._together(advice)
        return Recommendations(
            name=self._plain.graph.name,
            gpu=self._gpu.name,
            budget_bytes=self._budget,
            plain=self._plain.figures,
            engine=self._oracle.engine,
            advice=tuple(advice),
            together=together,
            rejected=tuple(self._rejected),
        )

    def _judged(
        self, settings: Settings, grade: Mapping[str, Any], before: Sequence[_Trial]
    ) -> _Trial | None:
        """The trial of one candidate; None, and a rejection, where it does not help."""
        exactness: Exactness | None = grade["exactness"]
        trial: _Trial | None = None
        if grade["reason"] is not None or exactness is None:
            self._reject(settings, str(grade["reason"]))
        elif not allowed(exactness, self._allow):
            self._reject(settings, f"its results are {exactness}, and {self._allow} is asked for")
        else:
            trial = self._tried_or_rejected(settings, exactness)
        if trial is None or any(_same(trial, other) for other in before):
            return None  # or another setting of this technique does the very same to this step
        if self._saving(trial) < LEAST_SHARE * self._plain.figures.peak_reserved_bytes:
            self._reject(settings, self._why_not(trial))
            return None
        return trial

    def _tried_or_rejected(self, settings: Settings, exactness: Exactness) -> _Trial | None:
        try:
            return self._tried((settings,), exactness)
        except MemfitError as failure:
            self._reject(settings, str(failure))
            return None

    def _reject(self, settings: Settings, reason: str) -> None:
        """Noted once for each technique and reason."""
        text = " ".join(reason.split())
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
        known = {(row.settings["technique"], row.reason) for row in self._rejected}
        if (settings["technique"], text) not in known:
            self._rejected.append(Rejection(settings=settings, reason=text))

    def _tried(self, techniques: tuple[Settings, ...], exactness: Exactness) -> _Trial:
        """The techniques on the step: peaks by the allocator, seconds by the roofline. Raises MemfitError."""
        peaks: Peaks = self._oracle.evaluate(techniques)
        if peaks.failure is not None:
            raise UsageError(peaks.failure)
        graph = self._oracle.graph(techniques)
        return _Trial(
            techniques=techniques,
            exactness=exactness,
            graph=graph,
            figures=StepFigures(
                peak_requested_bytes=peaks.requested_bytes,
                peak_allocated_bytes=peaks.allocated_bytes,
                peak_reserved_bytes=peaks.reserved_bytes,
                step_seconds=sum(op_seconds(op, self._gpu) for op in graph.ops),
                flops=float(graph.flops),
                peak_by_category=graph.by_category(),
                peak_by_phase=graph.phase_peaks(),
            ),
        )

    def _saving(self, trial: _Trial) -> int:
        return self._plain.figures.peak_reserved_bytes - trial.figures.peak_reserved_bytes

    def _why_not(self, trial: _Trial) -> str:
        """Where the saving goes, or what the peak is made of, which this technique does not touch."""
        graph, plain = self._plain.graph, self._plain.figures
        change = -self._saving(trial)
        asked = plain.peak_requested_bytes - trial.figures.peak_requested_bytes
        if asked >= LEAST_SHARE * plain.peak_reserved_bytes:
            return (
                f"tensors ask for {format_bytes(asked)} less at the peak, but what is reserved does not "
                "fall: the allocator's segments have more holes then"
            )
        effect = (
            f"it adds {format_bytes(change)} to the peak"
            if change > LEAST_SHARE * plain.peak_reserved_bytes
            else "the peak stays"
        )
        if graph.peak_index < 0:
            return effect
        parts = list(graph.by_category().items())[:2]
        whole = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
        return f"{effect}: it is in the {graph.ops[graph.peak_index].phase}, and made of {whole}"

    def _advice(self, trial: _Trial) -> Recommendation:
        plain, planned = self._plain.figures, trial.figures
        fits = planned.peak_reserved_bytes <= self._budget
        recomputed = planned.flops / plain.flops - 1 if plain.flops else 0.0
        plan = Plan(
            workload=self._plain.graph.name,
            workload_spec=self._spec,
            gpu=self._gpu.key,
            budget_bytes=self._budget,
            techniques=trial.techniques,
            exactness=trial.exactness,
            plain=plain,
            planned=planned,
            recompute_percent=100 * max(recomputed, 0.0),
            engine=self._oracle.engine,
        )
        return Recommendation(
            name=" + ".join(settings_text(settings) for settings in trial.techniques),
            plan=plan,
            saving_bytes=self._saving(trial),
            saving_requested_bytes=plain.peak_requested_bytes - planned.peak_requested_bytes,
            cost_seconds=planned.step_seconds - plain.step_seconds,
            fits=fits,
        )

    def _together(self, advice: Sequence[Recommendation]) -> Recommendation | None:
        """Several at once: in the order of their rank, and where that does not fit, the strongest."""
        stacked = self._stacked(advice)
        if stacked is not None and stacked.figures.peak_reserved_bytes > self._budget:
            strongest = self._stacked(sorted(advice, key=lambda row: (-row.saving_bytes, row.name)))
            assert strongest is not None
            stacked = max(stacked, strongest, key=self._saving)
        return None if stacked is None or len(stacked.techniques) < 2 else self._advice(stacked)

    def _stacked(self, advice: Sequence[Recommendation]) -> _Trial | None:
        """One setting of each technique on top of the others, as long as the peak falls (and is too high)."""
        chosen: _Trial | None = None
        least = LEAST_SHARE * self._plain.figures.peak_reserved_bytes
        used: set[str] = set()
        for row in advice:
            (settings,) = row.plan.techniques
            if settings["technique"] in used or len(used) >= MOST_TOGETHER:
                continue
            before = () if chosen is None else chosen.techniques
            grade = weakest([row.exactness, "exact" if chosen is None else chosen.exactness])
            try:
                trial = self._tried((*before, settings), grade)
            except MemfitError:
                continue  # these two cannot be on one model
            if chosen is None or self._saving(trial) >= self._saving(chosen) + least:
                chosen = trial
                used.add(str(settings["technique"]))
            if self._fits_only_now(chosen):
                break
        return chosen

    def _fits_only_now(self, trial: _Trial) -> bool:
        plain = self._plain.figures.peak_reserved_bytes
        return plain > self._budget >= trial.figures.peak_reserved_bytes


def _same(one: _Trial, other: _Trial) -> bool:
    return (
        one.techniques[0]["technique"] == other.techniques[0]["technique"]
        and one.figures.peak_reserved_bytes == other.figures.peak_reserved_bytes
        and one.figures.step_seconds == other.figures.step_seconds
    )


def _rank(row: Recommendation) -> tuple[bool, int, float, str]:
    """What fits comes first; then by bytes saved for each per cent of time; of equals by name."""
    price = max(row.cost_percent, FREE_PERCENT)
    return (not row.fits, EXACTNESS_ORDER.index(row.exactness) // 3, -row.saving_bytes / price, row.name)
