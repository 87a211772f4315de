"""From a workload to a verified plan, on the made-up GPU and with the portable engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from memfit.core.devices import find_gpu
from memfit.core.errors import UsageError, WorkloadFailed
from memfit.core.trace import Trace
from memfit.planning import FitResult, Plan, advice, plan
from memfit.planning.fit import checked_budget
from memfit.planning.oracle import Engine, open_oracle

GPU = "rtx3060-12gb"
MODELS = Path(__file__).with_name("tiny_models.py")


@functools.cache
def plain(workload: str, engine: Engine) -> FitResult:
    """The plain step, which fits."""
    return plan(f"{MODELS}:{workload}", gpu=GPU, verify=False, engine=engine)


def share_of_plain(workload: str, share: float, *, engine: Engine = "dryrun", **settings: Any) -> FitResult:
    """The plan for a part of what the plain step reserves."""
    budget = int(plain(workload, engine).plain.peak_reserved_bytes * share)
    return plan(f"{MODELS}:{workload}", gpu=GPU, budget=budget, engine=engine, **settings)


def check(result: FitResult) -> None:
    """What holds for every plan that fits."""
    assert result.fits
    assert result.planned is not None
    assert result.planned.peak_reserved_bytes <= result.budget_bytes < result.plain.peak_reserved_bytes
    assert result.lower_bound_percent is not None
    assert result.recompute_percent is not None
    assert result.lower_bound_percent <= result.recompute_percent + 1e-6
    named = [c for c in result.candidates if c.name == result.best_named]
    assert all(result.planned.step_seconds <= c.figures.step_seconds * (1 + 1e-9) for c in named)


@pytest.mark.dryrun
@pytest.mark.parametrize("workload", ["gpt", "cnn"])
def test_a_plan_fits_is_bitwise_and_no_slower_than_named_schedules(workload: str, tmp_path: Path) -> None:
    result = share_of_plain(workload, 0.7, traces=tmp_path)
    check(result)
    assert result.engine == "dryrun"
    assert result.exactness == "exact"
    assert result.verified is not None
    assert result.verified.passed
    assert result.verified.bitwise
    made = result.plan
    assert made is not None
    assert Plan.load(made.save(tmp_path / "plan.json")) == made
    for figures in (result.plain, result.planned):
        assert figures is not None
        assert figures.trace_path is not None
        assert Trace.load(figures.trace_path).action.size > 0


@pytest.mark.dryrun
def test_a_model_without_blocks_has_plans_too() -> None:
    result = share_of_plain("graph", 0.7)
    check(result)
    assert result.verified is not None
    assert result.verified.bitwise


@pytest.mark.dryrun
def test_a_plain_step_that_fits_is_left_alone() -> None:
    result = plain("gpt", "dryrun")
    assert result.plain_fits
    assert result.fits
    assert result.techniques == ()
    assert result.recompute_percent == result.lower_bound_percent == 0.0


@pytest.mark.slow
@pytest.mark.dryrun
def test_levers_are_used_where_they_are_allowed() -> None:
    result = share_of_plain("gpt", 0.4, allow="reordered", verify=False)
    assert result.fits
    assert result.exactness == "reordered"
    assert result.lower_bound_percent is None
    assert any(settings["technique"] != "gradient_checkpointing" for settings in result.techniques)


@pytest.mark.dryrun
@pytest.mark.slow
def test_the_same_question_has_the_same_plan() -> None:
    first, second = (share_of_plain("gpt", 0.7, verify=False) for _ in range(2))
    assert first.techniques == second.techniques
    assert first.planned is not None
    assert second.planned is not None
    assert first.planned.peak_reserved_bytes == second.planned.peak_reserved_bytes


@pytest.mark.dryrun
def test_when_nothing_fits_the_least_budget_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "WAYS", advice.WAYS[:3])  # adapters load peft, which takes its time
    result = share_of_plain("cnn", 0.1, verify=False)
    assert not result.fits
    assert result.planned is None
    assert result.plan is None
    assert result.least_budget_bytes is not None
    assert result.budget_bytes < result.least_budget_bytes < result.plain.peak_reserved_bytes
    assert result.advice
    for one in result.advice:
        assert one.fits == (one.peak_reserved_bytes <= result.budget_bytes)
        assert one.peak_reserved_bytes < result.plain.peak_reserved_bytes
    assert [one.what for one in result.advice] == [
        what for what, _, _ in advice.WAYS[1:3]
    ]  # SGD has no 8 bit


@pytest.mark.dryrun
def test_a_workload_that_raises_is_reported_as_such(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def workload():\n    raise RuntimeError('no data here')\n")
    with pytest.raises(WorkloadFailed, match="no data here"):
        plan(f"{file}:workload", gpu=GPU)


def test_the_portable_engine_plans_too() -> None:
    result = share_of_plain("cnn", 0.7, engine="portable", verify=False)
    check(result)
    assert result.engine == "portable"


@pytest.mark.dryrun
def test_a_quick_try_reserves_to_the_byte_what_a_process_of_its_own_does(tmp_path: Path) -> None:
    spec = f"{MODELS}:gpt"
    blocks = {f"blocks.{n}": saves for n, saves in enumerate(([], ["linear:3"], ["attention", "random"]))}
    with open_oracle({"spec": spec, "folder": "."}, spec, find_gpu(GPU), tmp_path, engine="dryrun") as oracle:
        plans = ((), ({"technique": "gradient_checkpointing", "blocks": blocks},))
        unfit = ({"technique": "gradient_checkpointing", "blocks": {"no.such": []}},)
        *at_once, failed = oracle.evaluate_all((*plans, unfit))
        assert "no.such" in str(failed.failure)
        for techniques, beside in zip(plans, at_once, strict=True):
            quick, own = oracle.evaluate(techniques), oracle.final(techniques).figures
            assert quick.failure is None
            assert quick == beside
            assert quick.requested_bytes == own.peak_requested_bytes
            assert quick.allocated_bytes == own.peak_allocated_bytes
            assert quick.reserved_bytes == own.peak_reserved_bytes
        graph = oracle.graph(())
        assert graph.beside_bytes > 0
        assert graph.peak_bytes + graph.beside_bytes == oracle.evaluate(()).requested_bytes


def test_json_has_the_keys_that_were_promised() -> None:
    keys = plain("cnn", "portable").to_json().keys()
    promised = (
        "schema_version plain planned budget_bytes fits techniques exactness recompute_percent "
        "lower_bound_percent verified least_budget_bytes candidates"
    )
    assert set(promised.split()) <= keys


def test_budgets_are_checked_before_anything_runs() -> None:
    gpu = find_gpu(GPU)
    assert checked_budget(None, gpu) == gpu.default_budget_bytes
    assert checked_budget("8GiB", gpu) == 8 << 30
    with pytest.raises(UsageError, match="no step fits that"):
        checked_budget("4KiB", gpu)
    with pytest.raises(UsageError, match="more than the"):
        checked_budget("80GiB", gpu)
    with pytest.raises(UsageError, match="use one of"):
        plan("hf:gpt2", gpu=GPU, allow="roughly")  # type: ignore[arg-type]
