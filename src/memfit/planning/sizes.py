"""The largest batch or the longest sequence that fits, with the plan for it; and the cheapest GPU that does.

Whether a size fits is asked with the leanest ways of training: every block recomputed, with and without the
levers that ``allow`` admits, and plain. One session answers, with a new batch for each size; sizes are
doubled until one does not fit, and bisected from there. Then the fastest plan for the largest size is sought
as for any other, in processes of its own: it has the last word.

Micro-batches are left out of the question about batches: cut into pieces, any batch fits that fits as one
sample.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness, checked_grade
from memfit.core.units import format_bytes
from memfit.planning.bench import ModelFacts, Peaks
from memfit.planning.explore import Progress
from memfit.planning.figures import Settings
from memfit.planning.fit import Verifier, checked_budget, fit_on, no_progress, reachable, workload_and_spec
from memfit.planning.oracle import Engine, StepOracle, open_oracle
from memfit.planning.plan import SCHEMA_VERSION, FitResult
from memfit.planning.schedules import checkpointing, levers

if TYPE_CHECKING:
    from memfit.core.workload import Workload

Dimension = Literal["batch", "seq"]
GRAIN: Mapping[str, int] = {"batch": 1, "seq": 8}
"""Sizes are multiples of this."""
MOST: Mapping[str, int] = {"batch": 1 << 16, "seq": 1 << 20}
STEPS_BACK = 4
"""How often the next smaller size is planned for, where no plan holds in a process of its own."""


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """One size that was asked about: does the leanest way of training fit, and what it reserves in bytes."""

    size: int
    fits: bool
    least_reserved_bytes: int | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class LargestResult:
    """The answer: ``size`` is None where not even the smallest fits; ``fit`` is the plan at that size.

    ``limit`` says what stopped the search: the budget, or the model (it has no more positions).
    """

    dimension: Dimension
    size: int | None
    asked_size: int | None
    fit: FitResult | None
    limit: str
    tried: tuple[SizeTried, ...]
    wall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `memfit fit --maximize --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "maximize": self.dimension,
            "size": self.size,
            "asked_size": self.asked_size,
            "limit": self.limit,
            "tried": [vars(one) for one in self.tried],
            "fit": None if self.fit is None else self.fit.to_json(),
            "wall_seconds": self.wall_seconds,
        }


def largest(
    workload: Workload | str,
    dimension: Dimension,
    *,
    gpu: GPU | str,
    budget: int | str | None = None,
    allow: Exactness = "exact",
    verify: bool = True,
    progress: Progress | None = None,
    engine: Engine = "auto",
    traces: str | Path | None = None,
    seed: int = 0,
) -> LargestResult:
    """The largest batch, or longest sequence, whose training step fits, and the fastest plan for it.

    Args:
        dimension: ``"batch"`` (any workload; one that is no text of ours has its samples repeated), or
            ``"seq"`` (``hf:`` workloads).
        workload, gpu, budget, allow, verify, progress, engine, traces, seed: as for `memfit.plan`.

    Raises:
        UsageError, WorkloadFailed, CannotRunHere: as `memfit.plan`; and UsageError for a sequence where the
            workload has no setting for it.
    """
    started = time.perf_counter()
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    budget_bytes = checked_budget(budget, device)
    reference, spec = workload_and_spec(workload)
    if dimension == "seq" and not (spec or "").startswith("hf:"):
        raise UsageError(f"--maximize seq needs an hf: workload, whose text has seq=; {spec!r} has none")
    show = progress or no_progress
    with ExitStack() as stack:
        folder = Path(traces or stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-")))
        oracle = stack.enter_context(open_oracle(reference, spec, device, folder, engine=engine, seed=seed))
        sizes = SizeSearch.over(oracle, stack, reference, spec, dimension, allow, show)
        size = sizes.largest(reachable(budget_bytes, device))
        result = None
        for _ in range(STEPS_BACK):
            if size is None or size < 1:
                break
            other = sizes.at(size)
            verifier = stack.enter_context(Verifier(other, seed)) if verify else None
            with oracle.with_workload(other) as own:
                result = fit_on(
                    own,
                    device,
                    budget_bytes,
                    spec=other["spec"] if spec else None,
                    allow=allow,
                    verifier=verifier,
                    show=show,
                    seed=seed,
                )  # fmt: skip
            if result.fits:
                break
            size -= GRAIN[dimension]
        return LargestResult(
            dimension=dimension,
            size=size if result is not None and result.fits else None,
            asked_size=sizes.start,
            fit=result,
            limit=sizes.limit,
            tried=tuple(sizes.tried.values()),
            wall_seconds=time.perf_counter() - started,
        )


def sized(reference: Mapping[str, Any], dimension: Dimension, size: int) -> dict[str, Any]:
    """The reference of the same workload at another size."""
    spec = str(reference.get("spec", ""))
    if not spec.startswith(("hf:", "tv:")):
        return {**reference, "samples": size}
    setting = re.compile(rf",\s*{dimension}\s*=[^,]*")
    return {**reference, "spec": f"{setting.sub('', spec)},{dimension}={size}"}


def size_of(reference: Mapping[str, Any], dimension: Dimension, facts: ModelFacts) -> int | None:
    """The size that the workload has as it is given; None for a sequence that its text does not name."""
    if dimension == "batch":
        return facts.samples
    found = re.search(r",\s*seq\s*=\s*(\d+)", str(reference.get("spec", "")))
    return int(found[1]) if found else None


@dataclass(kw_only=True)
class SizeSearch:
    """Doubling and bisecting over sizes. ``ask`` runs one way of training at one size."""

    ask: Callable[[Mapping[str, Any], tuple[Settings, ...]], Peaks]
    reference: Mapping[str, Any]
    dimension: Dimension
    start: int | None
    ways: list[tuple[Settings, ...]]
    show: Progress = no_progress
    limit: str = field(default="", init=False)
    tried: dict[int, SizeTried] = field(default_factory=dict, init=False)

    @classmethod
    def over(
        cls,
        oracle: StepOracle,
        stack: ExitStack,
        reference: Mapping[str, Any],
        spec: str | None,
        dimension: Dimension,
        allow: Exactness,
        show: Progress,
    ) -> SizeSearch:
        """The search on a session of ``oracle``, which ``stack`` closes."""
        session = stack.enter_context(oracle.open("memfit.planning.evaluate_sizes:SizedSession"))
        facts = ModelFacts.from_json(session.call("facts"))
        return cls(
            ask=lambda other, way: Peaks(
                **session.call("evaluate_at", workload=dict(other), techniques=list(way))
            ),
            reference=reference,
            dimension=dimension,
            start=size_of(reference, dimension, facts),
            ways=lean_ways(facts, allow),
            show=show,
        )

    def at(self, size: int) -> dict[str, Any]:
        """The workload's reference at a size."""
        return sized(self.reference, self.dimension, size)

    def largest(self, budget_bytes: int) -> int | None:
        """The largest size for which a lean way of training reserves no more; None where none does."""
        grain, most = GRAIN[self.dimension], MOST[self.dimension]
        size = max((self.start or 64 * grain) // grain * grain, grain)
        if self._fits(size, budget_bytes):
            low, high = size, 2 * size
            while high <= most and self._fits(high, budget_bytes):
                low, high = high, 2 * high
        else:
            low, high = 0, size
        while high - low > grain:
            middle = (low + high) // (2 * grain) * grain
            if middle <= low:
                break
            if self._fits(middle, budget_bytes):
                low = middle
            else:
                high = middle
        stopped = self.tried.get(high)
        self.limit = (stopped.reason or "the budget") if stopped else f"{self.dimension} {most} was reached"
        return low or None

    def _fits(self, size: int, budget_bytes: int) -> bool:
        self.show("sizes", len(self.tried), 0)
        least: int | None = None
        reasons: list[str] = []
        for way in list(self.ways):
            peaks = self.ask(self.at(size), way)
            if peaks.failure is not None:
                reasons.append(peaks.failure)
                continue
            least = peaks.reserved_bytes if least is None else min(least, peaks.reserved_bytes)
            if peaks.reserved_bytes <= budget_bytes:
                self.ways.remove(way)
                self.ways.insert(0, way)  # it is the first to ask next time
                break
        fits = least is not None and least <= budget_bytes
        reason = None
        if not fits:
            reason = reasons[0] if least is None else f"the leanest plan reserves {format_bytes(least)}"
        self.tried[size] = SizeTried(size=size, fits=fits, least_reserved_bytes=least, reason=reason)
        return fits


def lean_ways(facts: ModelFacts, allow: Exactness) -> list[tuple[Settings, ...]]:
    """The ways of training that need least: every block recomputed under each lever, most levers first; then
    all but the last block; then plain."""
    checked_grade(allow)
    found = levers(
        allow,
        samples=1,
        chunked_loss=facts.chunked_loss,
        micro_batching=None,
        implementations=facts.implementations,
        expandable_segments=facts.expandable_segments,
    )
    ordered = sorted(found, key=lambda lever: -len(lever.settings))
    count = len(facts.blocks)
    schedules: list[tuple[tuple[str, ...] | None, ...]] = [((),) * count]
    if count > 1:
        schedules.append((*((),) * (count - 1), None))
    schedules.append((None,) * count)
    ways = [
        (*checkpointing(facts.blocks, schedule), *lever.settings)
        for schedule in schedules
        for lever in ordered
    ]
    return list({repr(way): way for way in ways}.values())
