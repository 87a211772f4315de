"""How many GPUs a workload needs: figures against arithmetic, the answer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed import scale_workload as known
from memfit.cli import main
from memfit.core.errors import UsageError
from memfit.distributed import verify
from memfit.distributed.scaling import scale
from memfit.distributed.scaling_values import ScaleCase, ScaleResult
from memfit.distributed.strategies import strategies_for, strategy_named
from memfit.reports.scale import scale_page, scale_text
from memfit.reports.text import to_text

FILE = Path(__file__).with_name("scale_workload.py")
NUMBERS = known.BLOCKS * known.BLOCK_NUMBERS + known.HEAD_NUMBERS


@pytest.mark.dryrun
def test_ranks_hold_and_send_what_arithmetic_says() -> None:
    """fp32 AdamW: 16 bytes a parameter whole; what is resting, and what the collectives of a step carry."""
    names = ["ddp", "zero1", "fsdp2", "fsdp2-keep"]
    settings: dict[str, Any] = {"gpu": "a100-80gb", "plans": ["plain"], "verify": False}
    result = scale(f"{FILE}:feed", gpus=[1, 4], strategies=names, link_bytes_per_second=1e9, **settings)
    one, *others = result.cases
    cases = {case.strategy: case for case in others}
    assert list(cases) == names and not [case.problem for case in result.cases if case.problem]
    assert result.one_gpu == "plain" and result.best == one and result.samples == 8
    whole = 4 * NUMBERS
    reduced = cases["ddp"].collectives["all_reduce"]  # in DDP's buckets; of a ring of 4 each sends 3/2 of it
    assert reduced[1:] == (whole, pytest.approx(1.5 * whole, abs=8))
    # A gather before forward and one before backward, and one scatter; the root's is kept between.
    blocks = 4 * known.BLOCKS * known.BLOCK_NUMBERS
    gathered = {name: cases[name].collectives["all_gather"] for name in ("fsdp2", "fsdp2-keep")}
    assert gathered["fsdp2"][1:] == pytest.approx(((whole + blocks) / 4, (whole + blocks) * 3 / 4), rel=0.01)
    assert gathered["fsdp2-keep"][:2] == (known.BLOCKS + 1, pytest.approx(whole / 4, rel=0.01))
    assert cases["fsdp2"].collectives["reduce_scatter"][1] == pytest.approx(whole, rel=0.01)
    # Of parameters, gradients and state (16 bytes each) three quarters are elsewhere; a block is gathered.
    saved = cases["ddp"].peak_requested_bytes - cases["fsdp2"].peak_requested_bytes
    assert saved == pytest.approx(0.75 * 16 * NUMBERS, rel=0.35)
    assert cases["zero1"].peak_requested_bytes < cases["ddp"].peak_requested_bytes
    for case in result.cases:
        assert case.samples == 8 // case.gpus
        assert case.libraries_bytes == pytest.approx(0 if case.gpus == 1 else 6e8, abs=1e8)
        assert case.compute_seconds is not None
        sending = case.sent_bytes / 1e9
        bounds = (max(case.compute_seconds, sending), case.compute_seconds + sending)
        assert case.step_seconds_bounds == pytest.approx(bounds)


@pytest.mark.slow
@pytest.mark.dryrun
def test_tensor_parallel_that_computes_something_else_is_refuted() -> None:
    """The module runs when it is cut, and mixes up positions: only real values tell."""
    result = scale(f"{FILE}:attention", gpu="a100-80gb", gpus=[2], strategies=["ddp", "tp"], plans=["plain"])
    cases = {case.strategy: case for case in result.cases}
    assert not cases["tp2"].fits and "differs from one process" in str(cases["tp2"].problem)
    assert cases["ddp"].fits and [one.passed for one in result.verified] == [False, True]
    assert verify(f"{FILE}:feed", strategy="tp").passed
    cut = scale(f"{FILE}:feed", gpu="a100-80gb", gpus=[4], strategies=["tp"], plans=["plain"], verify=False)
    groups, alone = cut.cases
    assert (groups.strategy, alone.strategy) == ("tp2+fsdp2", "tp4") and cut.verified[0].passed
    assert (groups.samples, alone.samples) == (4, 8) and groups.fits and alone.fits
    # Two sums of activations for each pair: after the rows forward, before the columns backward.
    calls, own, _ = alone.collectives["all_reduce"]
    assert calls in range(2 * known.BLOCKS - 1, 2 * known.BLOCKS + 1)
    assert own == calls * 4 * known.SAMPLES * 64 * known.WIDTH


@pytest.mark.slow
@pytest.mark.dryrun
def test_plans_are_sought_where_the_plain_step_does_not_fit_and_caches_are_given_back() -> None:
    settings: dict[str, Any] = {"gpu": "a100-80gb", "strategies": ["fsdp2"], "verify": False}
    one = scale(f"{FILE}:activations", gpus=[1], budget="600MiB", **settings)
    plain, full, planned = one.cases
    assert (plain.fits, full.fits, planned.fits) == (False, True, True)
    assert planned.compute_seconds is not None and full.compute_seconds is not None
    assert planned.compute_seconds <= full.compute_seconds and planned.peak_reserved_bytes <= 600 << 20
    assert one.one_gpu in ("full", "planned") and one.plan is not None
    two = scale(f"{FILE}:activations", gpus=[1, 2], budget="350MiB", **settings)
    cases = {(case.gpus, case.plan): case for case in two.cases}
    assert "no plan" in str(cases[1, "planned"].problem) and two.one_gpu is None and two.least_gpus == 2
    tight = cases[2, "plain"]
    assert tight.fits and tight.tight and tight.peak_reserved_bytes <= 350 << 20


# ------------------------------------------------------------------------------------ the answer


def case(gpus: int, strategy: str, total: int, **settings: Any) -> ScaleCase:
    base = ScaleCase(
        gpus=gpus, strategy=strategy, plan="plain", samples=8 // gpus, peak_reserved_bytes=total - 2,
        peak_allocated_bytes=total - 2, device_total_bytes=total, limit_bytes=100, fits=total <= 100,
        compute_seconds=1.0 / gpus,
    )  # fmt: skip
    return replace(base, **settings)


def result_of(*cases: ScaleCase) -> ScaleResult:
    return ScaleResult(
        workload="w", workload_spec=None, gpu="a100-80gb", budget_bytes=None, batch="whole", samples=8,
        nvml_total_bytes=100, context_bytes=2, cases=cases,
    )  # fmt: skip


def test_the_answer_is_the_least_number_and_on_it_the_least_to_compute_and_send() -> None:
    full = {"plan": "full", "compute_seconds": 0.6, "techniques": ({"technique": "gradient_checkpointing"},)}
    sends = {"collectives": {"all_gather": (4, 10, 30)}}
    one, ddp = case(1, "one GPU", 300), case(2, "ddp", 150)
    fsdp, checkpointed = case(2, "fsdp2", 90, **sends), case(2, "ddp", 80, **full)
    result = result_of(one, ddp, checkpointed, fsdp, case(4, "ddp", 60))
    assert (result.least_gpus, result.best, result.one_gpu, result.plan) == (2, fsdp, None, None)
    kept = result_of(one, replace(checkpointed, fits=True), replace(fsdp, fits=False))
    assert kept.best == checkpointed and kept.plan is not None
    assert kept.plan.techniques == checkpointed.techniques and kept.plan.budget_bytes == 100
    assert result_of(case(1, "one GPU", 80)).one_gpu == "plain"
    nothing = result_of(one, case(2, "tp2", 0, problem="tensor parallel: no plan", fits=False))
    assert (nothing.fits, nothing.least_gpus, nothing.leanest) == (False, None, one)


def test_the_screen_says_the_answer_each_way_and_what_is_left_out() -> None:
    problems = [case(n, "tp2", 0, problem="tensor parallel: no plan", fits=False) for n in (2, 4)]
    result = result_of(case(1, "one GPU", 300), case(2, "fsdp2", 90), *problems)
    text = to_text(scale_text(result), width=100)
    assert "At least 2 GPUs (a100-80gb): fsdp2, 90 B of 100 B each." in text
    assert 'memfit.distributed.wrap(model, strategy="fsdp2", optimizer=…)' in text
    assert (
        "tp2 on 2 GPUs, tp2 on 4 GPUs: tensor parallel: no plan" in text
        and "No step times: the links" in text
    )
    assert max(map(len, text.splitlines())) <= 100
    page = scale_page(result, command="memfit scale <w>")
    assert "&lt;w&gt;" in page and "<script" not in page and "At least 2 GPUs" in page


# ---------------------------------------------------------------------------- names and numbers


def test_strategies_by_name() -> None:
    names = [strategy.name for strategy in strategies_for(8, ["ddp", "hsdp", "tp"])]
    assert names == ["ddp", "hsdp", "tp2+fsdp2", "tp4+fsdp2", "tp8"]
    assert [strategy.name for strategy in strategies_for(2, ["ddp", "hsdp", "tp"])] == ["ddp", "tp2"]
    assert strategy_named("hsdp", 16).shard_ranks == 8 and strategy_named("hsdp", 6).shard_ranks == 3
    assert strategy_named("tp4", 16) == strategy_named("tp4+fsdp2", 16)
    assert strategy_named("tp4", 16).data_ranks == 4
    for name, message in (("zero3", "is not known"), ("tp3", "no multiple"), ("tp2+hsdp", "fsdp2-keep")):
        with pytest.raises(UsageError, match=message):
            strategy_named(name, 8)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--gpus", "1,x"], 2, "'x' is not a number of GPUs; write 1,2,4,8"),
        (["--gpus", "12"], 2, "not a multiple of 8"),
        (["--strategies", "ddp,zero3"], 2, "strategy 'zero3' is not known"),
        (["--strategies", ","], 2, "nothing empty between commas"),
        (["--plans", "best"], 2, "plan 'best' is not known"),
        (["--budget", "8B"], 2, "no step fits that"),
        (["--link-bandwidth", "300GB"], 2, "bytes per second, like 300GB/s"),
        (["--gpu", "a100x"], 2, "unknown GPU"),
        (["--report", "train.py"], 2, "name a file that ends in .html"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", f"{FILE}:feed", "--gpu", "a100-80gb", *options]) == code
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
