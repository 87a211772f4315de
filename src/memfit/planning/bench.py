"""Where plans are tried: the oracle's interface, and a bench over it that remembers what was tried.

An oracle runs the step with a plan applied and says what it needs; there are two, the dry run and the
portable engine (see `memfit.planning.oracle`), and tests have one of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from memfit.capture.costs import op_seconds
from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import WorkloadFailed
from memfit.core.exactness import Exactness
from memfit.dryrun.result import DryRunResult
from memfit.planning.figures import Candidate, Settings, StepFigures
from memfit.planning.schedules import Lever, Rematerialized, Schedule, checkpointing

APPLIED_FIRST = ("parameter_offload",)
"""Techniques that take blocks as they were built: before blocks are recomputed."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the search must know of a model: its blocks, its batch, and what else can be done to it, how
    exactly.

    A technique whose exactness is None cannot be applied to this model.
    """

    blocks: tuple[str, ...]
    samples: int
    rematerialization: Exactness | None = None
    chunked_loss: Exactness | None = None
    micro_batching: Exactness | None = None
    implementations: Mapping[str, Exactness] = field(default_factory=dict)
    expandable_segments: Exactness | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelFacts:
        """Reads what `memfit.planning.evaluate.Session.facts` wrote."""
        return cls(**{**data, "blocks": tuple(data["blocks"])})


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a quick evaluation measures, in bytes. ``failure`` says why a plan could not be applied or run;
    ``host_bytes`` is memory of the host that the step has pinned, or holds states in."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    failure: str | None = None
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Final:
    """What a fresh process measured over three real steps with a plan; ``dry_run`` is all that the dry run
    found out, where it was that engine."""

    figures: StepFigures
    value_reads: tuple[Any, ...] = ()
    not_modelled: tuple[str, ...] = ()
    torch: str | None = None
    dry_run: DryRunResult | None = None


class Oracle(Protocol):
    """Runs the workload's step with techniques applied."""

    engine: str
    engine_reason: str | None

    def facts(self) -> ModelFacts:
        """The model's blocks and what can be done to it."""
        ...

    def graph(self, techniques: Sequence[Settings]) -> StepGraph:
        """The captured step."""
        ...

    def evaluate(self, techniques: Sequence[Settings]) -> Peaks:
        """The peaks of the step, quickly."""
        ...

    def final(
        self,
        techniques: Sequence[Settings],
        *,
        trace: str | None = None,
        answers: Mapping[str, str] | None = None,
    ) -> Final:
        """The peaks in a process of its own; keeps a trace under that name when one is given.

        Args:
            answers: by place, other answers than the expected ones where values are read that are not known.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Try:
    """One plan that was evaluated: a lever and what each block keeps, with predicted seconds and measured
    peaks."""

    name: str
    lever: Lever
    schedule: Schedule
    techniques: tuple[Settings, ...]
    seconds: float
    peaks: Peaks
    named: bool
    final: Final | None = None

    @property
    def key(self) -> str:
        """Equal for equal techniques."""
        return settings_key(self.techniques)

    def fits(self, budget_bytes: int) -> bool:
        """Whether the quick run went through and reserved no more than the budget."""
        return self.peaks.failure is None and self.peaks.reserved_bytes <= budget_bytes

    def candidate(self, plain_seconds: float, budget_bytes: int) -> Candidate:
        """The row of the time–memory front."""
        if self.final is not None:
            figures = self.final.figures
        else:
            figures = StepFigures(
                peak_requested_bytes=self.peaks.requested_bytes,
                peak_allocated_bytes=self.peaks.allocated_bytes,
                peak_reserved_bytes=self.peaks.reserved_bytes,
                step_seconds=self.seconds,
                host_bytes=self.peaks.host_bytes or self.lever.host_bytes,
            )
        return Candidate(
            name=self.name,
            techniques=self.techniques,
            exactness=self.lever.exactness,
            figures=figures,
            recompute_percent=100.0 * (figures.step_seconds / plain_seconds - 1.0),
            measured_by="session" if self.final is None else "fresh",
            fits=None if self.final is None else figures.peak_reserved_bytes <= budget_bytes,
        )


def settings_key(techniques: Sequence[Settings]) -> str:
    """One text for techniques that are the same."""
    return json.dumps(list(techniques), sort_keys=True)


def by_seconds(tried: Try) -> tuple[float, int, str]:
    """Orders plans: fastest first, by the step itself where it was measured; of equals the simpler one."""
    seconds = tried.seconds if tried.final is None else tried.final.figures.step_seconds
    return (round(seconds, 9), len(tried.techniques), tried.key)


class Bench:
    """An oracle with memory: each plan is run once per way of measuring, and everything tried is kept.

    Attributes:
        tries: by `Try.key`, in the order in which they were first tried.
    """

    def __init__(self, oracle: Oracle, gpu: GPU, blocks: Sequence[str]) -> None:
        self.oracle = oracle
        self.gpu = gpu
        self.blocks = tuple(blocks)
        self.tries: dict[str, Try] = {}
        self.evaluations = 0
        self._ahead: dict[str, Peaks] = {}

    def seconds(self, graph: StepGraph) -> list[float]:
        """Predicted seconds of each operator of a graph."""
        return [op_seconds(op, self.gpu) for op in graph.ops]

    def techniques(self, lever: Lever, schedule: Schedule) -> tuple[Settings, ...]:
        """The settings of a plan: checkpointing first, as it goes by the model as built, but for what takes
        plain blocks only."""
        early = tuple(s for s in lever.settings if s["technique"] in APPLIED_FIRST)
        late = tuple(s for s in lever.settings if s["technique"] not in APPLIED_FIRST)
        return (*early, *checkpointing(self.blocks, schedule), *late)

    def evaluate(
        self, name: str, lever: Lever, schedule: Schedule, seconds: float, *, named: bool = False
    ) -> Try:
        """The quick peaks of a plan; from memory when it was tried before."""
        techniques = self.techniques(lever, schedule)
        key = settings_key(techniques)
        known = self.tries.get(key)
        if known is None:
            self.evaluations += 1
            known = Try(
                name=name,
                lever=lever,
                schedule=schedule if isinstance(schedule, Rematerialized) else tuple(schedule),
                techniques=techniques,
                seconds=seconds,
                peaks=self._ahead.pop(key) if key in self._ahead else self.oracle.evaluate(techniques),
                named=named,
            )
            self.tries[key] = known
        elif named and not known.named:
            known = self.tries[key] = replace(known, name=name, named=True)
        return known

    def evaluate_ahead(self, plans: Sequence[tuple[Lever, Schedule]]) -> None:
        """Runs plans that are evaluated next, several at once where the oracle can."""
        wanted = {settings_key(plan): plan for plan in (self.techniques(*both) for both in plans)}
        new = {key: plan for key, plan in wanted.items() if key not in self.tries | self._ahead}
        several = getattr(self.oracle, "evaluate_all", None)
        if several is not None and len(new) > 1:
            self._ahead |= dict(zip(new, several(list(new.values())), strict=True))

    def finish(self, tried: Try) -> Try:
        """The same plan measured in a process of its own; where it fails there, the peaks say so.

        What the plain step raises comes through.
        """
        known = self.tries[tried.key]
        if known.final is None and known.peaks.failure is None:
            self.evaluations += 1
            trace = f"plan-{self.evaluations}" if known.techniques else "plain"
            try:
                final = self.oracle.final(known.techniques, trace=trace)
                known = replace(known, final=_with_host(final, known.lever))
            except WorkloadFailed as failure:
                if not known.techniques:
                    raise
                known = replace(known, peaks=replace(known.peaks, failure=str(failure)))
            self.tries[known.key] = known
        return known


def _with_host(final: Final, lever: Lever) -> Final:
    """With what a lever takes on the host and on the way there: no operator of the device shows it."""
    figures = replace(
        final.figures,
        step_seconds=final.figures.step_seconds + lever.host_seconds,
        host_bytes=final.figures.host_bytes or lever.host_bytes,
    )
    return replace(final, figures=figures)
