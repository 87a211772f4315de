"""Verification on real values: it passes what is right, and catches what is not."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_models
import torch

from memfit.core.workload import Workload
from memfit.planning import verify as module
from memfit.planning.figures import Settings, Verified
from memfit.planning.verify import compare


def blocks(names: str, saves: list[str]) -> Settings:
    return {"technique": "gradient_checkpointing", "blocks": {f"blocks.{n}": saves for n in names}}


@pytest.mark.parametrize("saves", [[], ["linear:0", "attention"], ["linear", "random"]])
def test_recomputation_is_bitwise_with_dropout(saves: list[str]) -> None:
    verified = compare(tiny_models.gpt(), [blocks("013", saves)], "exact")
    assert verified.passed
    assert verified.bitwise
    assert verified.scale == "the workload's small form"


def test_batch_norm_is_verified_with_its_buffers() -> None:
    verified = compare(tiny_models.cnn(), [blocks("02", ["convolution"])], "exact")
    assert verified.bitwise
    assert verified.scale == "the whole model, batch cut to 2"


def test_another_order_of_sums_is_not_exact_but_passes_as_reordered() -> None:
    settings: list[Settings] = [{"technique": "micro_batching", "micro_batches": 2}]
    assert compare(tiny_models.gpt(), settings, "exact").passed is False
    reordered = compare(tiny_models.gpt(), settings, "reordered")
    assert reordered.passed
    assert not reordered.bitwise
    assert reordered.max_relative_error is not None
    assert 0 < reordered.max_relative_error < reordered.tolerance
    assert "dropout off" in reordered.scale


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that would scale one parameter's gradient is caught, whatever it claims to be."""

    def wrong(techniques: object, model: torch.nn.Module, optimizer: object = None) -> None:
        if techniques:
            model.get_parameter("head.weight").register_hook(lambda gradient: gradient * 1.01)

    monkeypatch.setattr(module, "apply_settings", wrong)
    for exactness in ("exact", "reordered"):
        verified = compare(tiny_models.gpt(), [{"technique": "gradient_checkpointing"}], exactness)  # type: ignore[arg-type]
        assert verified.passed is False
        assert "gradient of head.weight" in verified.differences


def test_an_approximate_plan_has_its_error_stated() -> None:
    settings: list[Settings] = [{"technique": "micro_batching", "micro_batches": 2}]
    verified = compare(tiny_models.cnn(), settings, "approximate")
    assert verified.passed is None
    assert verified.max_relative_error is not None
    assert verified.max_relative_error > 0
    assert verified.reason is not None
    assert "approximate by choice" in verified.reason
    assert compare(tiny_models.cnn(), settings, "reordered").passed is False


def test_a_workload_that_cannot_run_on_the_cpu_says_why() -> None:
    from memfit.capture.workloads import workload_reference

    answer = module.verify(workload_reference(tiny_models.needs_a_gpu()), [blocks("0", [])], "exact")
    verified = Verified.from_json(answer)
    assert verified.passed is None
    assert verified.reason is not None
    assert "this loss runs on a GPU only" in verified.reason


def test_a_model_too_large_for_the_host_keeps_one_block_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    without_small: Workload = dataclasses.replace(
        tiny_models.gpt(),
        model=lambda: tiny_models.TinyGPT(32, 6),
        batch=lambda: torch.randint(0, 1024, (4, 16)),
    )
    monkeypatch.setattr(module, "_available_bytes", lambda: 1 << 20)
    verified = compare(without_small, [blocks("13", []), blocks("4", ["linear:0"])][:1], "exact")
    assert verified.bitwise
    assert verified.scale == "one block of each kind (blocks.0, blocks.1), batch cut to 2"
