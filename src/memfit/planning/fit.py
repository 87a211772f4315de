"""From a workload and a budget to a `FitResult`: oracle, search, bound and verification put together."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import ToolFailure, UsageError
from memfit.core.exactness import Exactness, checked_grade
from memfit.core.units import format_bytes, parse_bytes
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.worker import Worker
from memfit.planning.bench import Oracle, Try
from memfit.planning.bound import lower_bound
from memfit.planning.explore import Progress
from memfit.planning.figures import Advice, Settings, StepFigures, Verified
from memfit.planning.oracle import Engine, open_oracle, preload
from memfit.planning.plan import FitResult
from memfit.planning.search import Outcome, Search, recompute_percent
from memfit.planning.trust import device_memory, judged, other_answers_note

if TYPE_CHECKING:
    from memfit.core.workload import Workload

LEAST_BUDGET_BYTES = 1 << 20
VERIFY_SECONDS = 600.0


def no_progress(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def fit(
    workload: Workload | str,
    *,
    gpu: GPU | str,
    budget: int | str | None = None,
    allow: Exactness = "exact",
    verify: bool = True,
    progress: Progress | None = None,
    engine: Engine = "auto",
    traces: str | os.PathLike[str] | None = None,
    seed: int = 0,
    compiled: bool = False,
    host_memory: int | str | None = None,
) -> FitResult:
    """See `memfit.plan`, which this is."""
    started = time.perf_counter()
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    budget_bytes, host_budget_bytes = checked_budget(budget, device), checked_host_memory(host_memory)
    checked_grade(allow)
    show = progress or no_progress
    reference, spec = workload_and_spec(workload)
    folder = Path(traces) if traces is not None else Path(tempfile.mkdtemp(prefix="memfit-"))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        verifier = stack.enter_context(Verifier(reference, seed)) if verify else None
        oracle = stack.enter_context(open_oracle(reference, spec, device, folder, engine=engine, seed=seed))
        return fit_on(
            oracle,
            device,
            budget_bytes,
            spec=spec,
            allow=allow,
            verifier=verifier,
            show=show,
            started=started,
            seed=seed,
            compiled=compiled,
            host_budget_bytes=host_budget_bytes,
        )


def fit_on(
    oracle: Oracle,
    gpu: GPU,
    budget_bytes: int,
    *,
    spec: str | None,
    allow: Exactness,
    verifier: Verifier | None = None,
    show: Progress = no_progress,
    started: float | None = None,
    seed: int = 0,
    compiled: bool = False,
    host_budget_bytes: int | None = None,
) -> FitResult:
    """The search, the bounds and the verification, on an oracle that is open."""
    started = time.perf_counter() if started is None else started
    oracle.facts()
    planning = time.perf_counter()
    outcome = Search(
        oracle=oracle,
        gpu=gpu,
        budget_bytes=reachable(budget_bytes, gpu),
        allow=allow,
        compiled=compiled,
        host_budget_bytes=host_budget_bytes,
        progress=show,
    ).run()
    bounds = _bounds(outcome, gpu, budget_bytes, show)
    planning_seconds = time.perf_counter() - planning
    verified: Verified | None = None
    advice: tuple[Advice, ...] = ()
    if outcome.chosen is None:
        from memfit.planning.advice import advise  # it builds on this module's neighbours

        show("advice", 0, 1)
        advice = advise(oracle, outcome.facts, reachable(budget_bytes, gpu))
    if verifier is not None and outcome.chosen is not None and outcome.chosen.techniques:
        show("verify", 0, 1)
        verified = verifier.verify(outcome.chosen.techniques, outcome.chosen.lever.exactness)
        show("verify", 1, 1)
    chosen = outcome.chosen
    techniques = () if chosen is None else chosen.techniques
    final = outcome.plain if chosen is None or chosen.final is None else chosen.final
    dry = judged(oracle, techniques, final)
    return _result(
        outcome,
        oracle,
        gpu,
        budget_bytes,
        spec=spec,
        bounds=bounds,
        verified=verified,
        dry=dry,
        advice=advice,
        planning_seconds=planning_seconds,
        wall_seconds=time.perf_counter() - started,
        seed=seed,
    )


def checked_budget(budget: int | str | None, gpu: GPU) -> int:
    """The budget in bytes; the GPU's default for None. UsageError when nothing could have it."""
    if budget is None:
        return gpu.default_budget_bytes
    count = parse_bytes(budget, what="budget")
    if count < LEAST_BUDGET_BYTES:
        raise UsageError(
            f"budget {budget!r} is {count} bytes: no step fits that; write it with a unit, like 8GiB"
        )
    if count > gpu.nvml_total_bytes:
        raise UsageError(
            f"budget {budget!r} is {format_bytes(count)}, more than the "
            f"{format_bytes(gpu.nvml_total_bytes)} that {gpu.name} has: give at most "
            f"{format_bytes(gpu.default_budget_bytes)}, or another --gpu"
        )
    return count


def checked_host_memory(text: int | str | None) -> int | None:
    """Host memory that a plan may use, in bytes; None for as much as it likes."""
    return None if text is None else parse_bytes(text, what="host memory")


def reachable(budget_bytes: int, gpu: GPU) -> int:
    """What the allocator can really reserve of a budget: the context has its share first."""
    return min(budget_bytes, gpu.runtime_total_bytes - gpu.context_bytes)


def workload_and_spec(workload: Workload | str) -> tuple[dict[str, Any], str | None]:
    """How the child processes build the workload, and its text if it has one.

    Texts are read there, so that no torch is loaded here.
    """
    if isinstance(workload, str):
        return {"spec": workload, "folder": os.getcwd()}, workload
    from memfit.capture.workloads import workload_reference

    return workload_reference(workload), workload.spec


class Verifier:
    """The process in which plans are verified: started early, so that torch is loaded when it is asked."""

    def __init__(self, reference: Mapping[str, Any], seed: int) -> None:
        self._reference = reference
        self._seed = seed
        self._worker = Worker(None, preload=preload(reference.get("spec"), "memfit.planning.verify"))

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()

    def verify(self, techniques: Sequence[Settings], exactness: Exactness) -> Verified:
        """Runs the comparison; a process that is killed or takes too long is a reason, not an error."""
        try:
            answer = self._worker.call(
                "memfit.planning.verify:verify",
                timeout_seconds=VERIFY_SECONDS,
                workload=self._reference,
                techniques=list(techniques),
                exactness=exactness,
                seed=self._seed,
            )
        except ToolFailure as error:
            return Verified(passed=None, reason=str(error))
        return Verified.from_json(answer)


def _bounds(
    outcome: Outcome, gpu: GPU, budget_bytes: int, show: Progress
) -> tuple[float | None, float | None]:
    """Certified least recomputation in percent of the plain step: within the budget, and at the plan's own
    peak.

    Both are None for a plan with other levers than recomputation, and where no plan was found.
    """
    chosen = outcome.chosen
    if chosen is None or chosen.lever.step_settings:
        return None, None
    if not chosen.techniques:
        return 0.0, 0.0
    show("lower bound", 0, 2)
    seconds = outcome.op_seconds
    total = sum(seconds)
    percents = []
    known = chosen.seconds - total
    peaks = ((budget_bytes, None), (chosen.peaks.requested_bytes, known))
    for number, (peak, known_cost) in enumerate(peaks):
        peak -= outcome.graph.beside_bytes
        bound = lower_bound(outcome.graph, seconds, peak, lives=outcome.lives, known_cost=known_cost)
        percents.append(100.0 * bound.cost / total if bound.feasible and total else None)
        show("lower bound", number + 1, 2)
    return percents[0], percents[1]


def _result(
    outcome: Outcome,
    oracle: Oracle,
    gpu: GPU,
    budget_bytes: int,
    *,
    spec: str | None,
    bounds: tuple[float | None, float | None],
    verified: Verified | None,
    dry: DryRunResult | None,
    advice: tuple[Advice, ...],
    planning_seconds: float,
    wall_seconds: float,
    seed: int,
) -> FitResult:
    chosen, plain = outcome.chosen, outcome.plain.figures
    final = outcome.plain if chosen is None or chosen.final is None else chosen.final
    planned = None if chosen is None or chosen.final is None else chosen.final.figures
    worst = planned if planned is not None else plain
    least = outcome.least.final.figures.peak_reserved_bytes if outcome.least and outcome.least.final else None
    return FitResult(
        workload=outcome.graph.name,
        workload_spec=spec,
        gpu=gpu.key,
        engine=oracle.engine,
        engine_reason=oracle.engine_reason,
        torch=outcome.plain.torch,
        budget_bytes=budget_bytes,
        device_total_bytes=gpu.context_bytes + worst.peak_reserved_bytes,
        context_bytes=gpu.context_bytes,
        plain=plain,
        plain_fits=plain.peak_reserved_bytes <= reachable(budget_bytes, gpu),
        planned=planned,
        fits=planned is not None and planned.peak_reserved_bytes <= reachable(budget_bytes, gpu),
        plan_name="none fits" if chosen is None else chosen.name,
        techniques=() if chosen is None else chosen.techniques,
        exactness="exact" if chosen is None else chosen.lever.exactness,
        recompute_percent=None if planned is None else recompute_percent(planned, plain),
        lower_bound_percent=bounds[0],
        lower_bound_at_peak_percent=bounds[1],
        best_named=None if outcome.best_named is None else outcome.best_named.name,
        verified=verified,
        least_budget_bytes=least,
        candidates=tuple(_candidate(tried, plain, budget_bytes) for tried in outcome.tries),
        evaluations=outcome.evaluations,
        planning_seconds=planning_seconds,
        wall_seconds=wall_seconds,
        value_reads=final.value_reads if dry is None else tuple(map(asdict, dry.value_reads)),
        interval=None if dry is None else dry.interval,
        estimates={} if dry is None else dry.estimates,
        device_memory=device_memory(dry, gpu, final),
        confidence=None if dry is None else dry.confidence,
        confidence_reasons=() if dry is None else dry.confidence_reasons,
        not_modelled=final.not_modelled,
        notes=(*outcome.notes, *other_answers_note(dry, budget_bytes)),
        advice=advice,
        fingerprint=outcome.facts.fingerprint,
        seed=seed,
    )


def _candidate(tried: Try, plain: StepFigures, budget_bytes: int) -> Any:
    return tried.candidate(plain.step_seconds, budget_bytes)
