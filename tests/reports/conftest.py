from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.devices import find_gpu
from memfit.core.trace import Action, Trace, TraceBuilder
from memfit.planning.figures import Candidate, StepFigures, Verified
from memfit.planning.plan import FitResult
from memfit.reports.report import FitReport
from memfit.reports.series import StepSeries

MIB = 1 << 20
BLOCKS = 12


def make_trace(*, recompute: bool, steps: int = 2) -> Trace:
    """Steps of a small chain by hand: parameters, state, `BLOCKS` activations, a loss, gradients."""
    builder = TraceBuilder()
    builder.append(Action.SEGMENT_ALLOC, size_bytes=(3000 if recompute else 6600) * MIB, phase="init")
    for block in range(BLOCKS):
        builder.alloc(40 * MIB, category="parameter", phase="init", module=f"h.{block}")
        builder.alloc(80 * MIB, category="optimizer_state", phase="init", module=f"h.{block}")
    for _ in range(steps):
        _step(builder, recompute)
    return builder.build()


def _step(builder: TraceBuilder, recompute: bool) -> None:
    batch = builder.alloc(1 * MIB, category="input", phase="forward")
    saved = []
    for block in range(BLOCKS):
        extra = builder.alloc(300 * MIB, category="activation", phase="forward", module=f"h.{block}")
        saved.append([builder.alloc(20 * MIB, category="activation", phase="forward"), extra])
        if recompute:
            builder.free(saved[-1].pop(), phase="forward")
    logits = builder.alloc(600 * MIB, category="activation", phase="forward", module="lm_head")
    loss = builder.alloc(600 * MIB, category="temporary", phase="backward")
    builder.free(logits, phase="backward")
    gradients = []
    for block in reversed(range(BLOCKS)):
        if recompute:
            saved[block].append(builder.alloc(300 * MIB, category="activation", phase="recompute"))
        gradients.append(builder.alloc(40 * MIB, category="gradient", phase="backward"))
        for held in saved[block]:
            builder.free(held, phase="backward")
    builder.free(loss, phase="backward")
    scratch = builder.alloc(160 * MIB, category="temporary", phase="optimizer")
    builder.free(scratch, phase="optimizer")
    for gradient in gradients:
        builder.free(gradient, phase="optimizer")
    builder.free(batch, phase="optimizer")


def figures(trace: Trace, reserved_mib: int, seconds: float) -> StepFigures:
    series = StepSeries.of(trace)
    assert series is not None
    peak = {name: int(values[series.peak_point]) for name, values in series.by_category.items()}
    return StepFigures(
        peak_requested_bytes=series.peak_bytes,
        peak_allocated_bytes=series.peak_bytes + 4 * MIB,
        peak_reserved_bytes=reserved_mib * MIB,
        step_seconds=seconds,
        peak_by_category={name: size for name, size in peak.items() if size},
    )


@pytest.fixture(scope="session")
def plain_trace() -> Trace:
    return make_trace(recompute=False)


@pytest.fixture(scope="session")
def planned_trace() -> Trace:
    return make_trace(recompute=True)


@pytest.fixture
def fitted(plain_trace: Trace, planned_trace: Trace) -> FitReport:
    """A fit that found a plan."""
    plain, planned = figures(plain_trace, 6600, 0.412), figures(planned_trace, 3000, 0.4385)
    checkpointing = {
        "technique": "gradient_checkpointing",
        "blocks": {f"transformer.h.{i}": ["linear:0", "attention"] if i < 8 else [] for i in range(BLOCKS)},
    }
    techniques = (checkpointing, {"technique": "chunked_cross_entropy", "chunks": 8})
    result = FitResult(
        workload="gpt2 (batch 8, seq 1024)",
        workload_spec="hf:gpt2,batch=8,seq=1024",
        gpu="rtx3060-12gb",
        engine="dryrun",
        engine_reason=None,
        torch="2.14.1+cu130",
        budget_bytes=3072 * MIB,
        device_total_bytes=None,
        context_bytes=300 * MIB,
        plain=plain,
        plain_fits=False,
        planned=planned,
        fits=True,
        plan_name="solver 3",
        techniques=techniques,
        exactness="exact",
        recompute_percent=6.3,
        lower_bound_percent=5.1,
        lower_bound_at_peak_percent=5.4,
        best_named="full checkpointing",
        verified=Verified(passed=True, bitwise=True, device="cpu", scale="1 of 12 blocks", steps=3),
        least_budget_bytes=None,
        candidates=(
            Candidate(
                name="plain",
                techniques=(),
                exactness="exact",
                figures=plain,
                recompute_percent=0.0,
                fits=False,
            ),
            Candidate(
                name="full checkpointing",
                techniques=(),
                exactness="exact",
                figures=replace(planned, peak_reserved_bytes=2600 * MIB, step_seconds=0.5),
                recompute_percent=21.0,
                fits=True,
            ),
            Candidate(
                name="solver 3",
                techniques=techniques,
                exactness="exact",
                figures=planned,
                recompute_percent=6.3,
                measured_by="fresh",
                fits=True,
            ),
        ),
        evaluations=31,
        planning_seconds=4.2,
        wall_seconds=11.8,
        not_modelled=("cuDNN workspaces come from a model",),
        confidence="medium",
        confidence_reasons=("cuDNN workspaces come from a model",),
    )
    return FitReport(
        result=result,
        gpu=find_gpu("rtx3060-12gb"),
        plain_series=StepSeries.of(plain_trace),
        planned_series=StepSeries.of(planned_trace),
        command="memfit fit hf:gpt2,batch=8,seq=1024 --gpu rtx3060-12gb --budget 3GiB",
        versions={"memfit": "0.1.0", "torch": "2.14.1+cu130"},
    )


@pytest.fixture
def unfitted(fitted: FitReport) -> FitReport:
    """A fit for which nothing was found."""
    result = replace(
        fitted.result,
        planned=None,
        fits=False,
        techniques=(),
        verified=None,
        recompute_percent=None,
        lower_bound_percent=None,
        budget_bytes=1024 * MIB,
        least_budget_bytes=2600 * MIB,
        plan_name="none",
    )
    return replace(fitted, result=result, planned_series=None)
