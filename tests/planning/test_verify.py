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


def test_what_changes_training_is_stated_not_failed() -> None:
    verified = compare(
        tiny_models.cnn(), [{"technique": "micro_batching", "micro_batches": 2}], "changes training"
    )
    assert verified.passed is None
    assert not verified.bitwise
    assert verified.differences
    assert verified.reason is not None
    assert "changes training by choice" in verified.reason


class FaintChain(torch.nn.Module):
    """Two products in a row whose gradients are about 1e-9: no numbers of fp16 unless the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to(self.first.weight.dtype)))).float()


def faint(factor: float, dtype: torch.dtype = torch.float32, **more: object) -> Workload:
    return Workload(
        name="faint",
        model=lambda: FaintChain().to(dtype),
        batch=lambda: torch.randn(4, 8),
        loss=lambda model, x: model(x).square().mean() * factor,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        **more,  # type: ignore[arg-type]
    )


FAINT, STRONG = 1e-8, 2e3
FP16: Settings = {"technique": "mixed_precision", "precision": "fp16"}


@pytest.mark.parametrize("factor", [FAINT, STRONG])
def test_fp16_is_verified_with_scaled_losses(factor: float) -> None:
    """Gradients that would underflow without a scale, and such that overflow with the largest, are those of
    fp32 but for fp16's rounding; plans that keep the order of sums are bitwise."""
    truth, _ = module._run(faint(factor), module.Scale(text=""), (), 0, 1.0)
    for workload, settings in (
        (faint(factor, precision="fp16-autocast"), []),
        (faint(factor, torch.float16), []),
        (faint(factor), [FP16]),
    ):
        _, seen = module._run_both(workload, module.Scale(text=""), settings, 0)
        for name in (name for name in truth if name.startswith("gradient")):
            assert seen[name].dtype == torch.float32
            torch.testing.assert_close(
                seen[name], truth[name], rtol=0.02, atol=0.01 * float(truth[name].abs().max())
            )
    verified = compare(faint(factor), [FP16], "approximate")
    assert verified.max_relative_error is not None
    assert 0 < verified.max_relative_error < 0.01
    recomputed: list[Settings] = [{"technique": "gradient_checkpointing", "blocks": {"first": []}}]
    assert compare(faint(factor, precision="fp16-autocast"), recomputed, "exact").bitwise


def test_a_workload_that_cannot_run_on_the_cpu_says_why() -> None:
    from memfit.capture.workloads import workload_reference

    answer = module.verify(workload_reference(tiny_models.needs_a_gpu()), [blocks("0", [])], "exact")
    verified = Verified.from_json(answer)
    assert verified.passed is None
    assert verified.reason is not None
    assert "this loss runs on a GPU only" in verified.reason


def test_a_batch_that_cannot_be_cut_brings_a_small_form() -> None:
    verified = compare(tiny_models.graph(), [{"technique": "rematerialization", "blocks": {"": []}}], "exact")
    assert verified.bitwise
    assert verified.scale == "the whole model, the batch's small form"


def test_a_model_too_large_for_the_host_keeps_one_block_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    without_small: Workload = dataclasses.replace(
        tiny_models.gpt(),
        model=lambda: tiny_models.TinyGPT(32, 6),
        batch=lambda: torch.randint(0, 1024, (4, 16)),
    )
    monkeypatch.setattr(module, "_available_bytes", lambda: 1 << 21)
    verified = compare(without_small, [blocks("13", []), blocks("4", ["linear:0"])][:1], "exact")
    assert verified.bitwise
    assert verified.scale == "one block of each kind (blocks.0, blocks.1), batch cut to 2"
    monkeypatch.setattr(module, "_available_bytes", lambda: 1 << 19)
    monkeypatch.setattr(module, "from_reference", lambda reference: without_small)
    unverified = module.verify({}, [blocks("13", [])], "exact")
    assert unverified["passed"] is None
    assert unverified["reason"].startswith("too large for this host")
