"""One training step against a plain loop: same numbers, micro-batches with the whole batch's gradients."""

from __future__ import annotations

import pytest
import torch
from models import MLP, classify, gpt, mlp
from torch import nn
from torch.nn import functional as F

from memfit.capture.step import build_step, split_batch, takes_size
from memfit.core.errors import UsageError, WorkloadFailed
from memfit.core.workload import Workload


def gradients(workload, **options):
    step = build_step(workload, device="cpu", **options)
    step.forward_backward()
    return {name: parameter.grad for name, parameter in step.model.named_parameters()}


def test_equals_a_loop_written_out():
    step = build_step(mlp(), device="cpu", seed=5)
    torch.manual_seed(5)
    model = MLP()
    torch.manual_seed(6)
    images, labels = mlp().batch()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        step.run()
    assert step.steps_done == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), step.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_phases_come_in_order():
    phases = []
    build_step(mlp(), device="cpu", micro_batches=2).run(phases.append)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer", "other"]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_micro_batches_have_the_gradients_of_the_whole(parts):
    """64 samples do not split evenly into 3 or 5: parts are weighted by their samples."""
    whole, split = gradients(mlp()), gradients(mlp(), micro_batches=parts)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)


def test_micro_batches_are_weighted_by_the_labels_that_count():
    ids = torch.randint(256, (4, 32))
    labels = ids.clone()
    labels[:2, 5:] = -100  # the first half has few labels

    def loss(model, batch):
        return F.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        )

    def weigh(batch):
        return float((batch["labels"] != -100).sum())

    plain = gpt(dropout=0.0)
    options = {"model": plain.model, "batch": lambda: {"ids": ids, "labels": labels}, "loss": loss}
    whole = gradients(Workload(name="padded", **options))
    weighted = gradients(Workload(name="padded", loss_weight=weigh, **options), micro_batches=2)
    unweighted = gradients(Workload(name="padded", **options), micro_batches=2)
    name = "blocks.0.up.weight"
    torch.testing.assert_close(weighted[name], whole[name], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(unweighted[name], whole[name], rtol=1e-4, atol=1e-6)


def test_splitting_makes_views_that_cover_the_batch():
    batch = {"a": torch.arange(7), "b": [torch.arange(14).view(7, 2), torch.tensor(3.0)], "name": "x"}
    parts = list(split_batch(batch, 3))
    assert [len(part["a"]) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["a"] for part in parts]), batch["a"])
    assert torch.equal(torch.cat([part["b"][0] for part in parts]), batch["b"][0])
    assert all(part["a"].untyped_storage()._cdata == batch["a"].untyped_storage()._cdata for part in parts)
    assert all(part["b"][1].item() == 3.0 and part["name"] == "x" for part in parts)


@pytest.mark.parametrize("parts", [0, 8])
def test_impossible_splits_are_refused(parts):
    with pytest.raises(UsageError, match="7 samples"):
        list(split_batch(torch.arange(7), parts))


def test_a_batch_without_one_size_is_refused():
    with pytest.raises(UsageError, match=r"\[3, 4\]"):
        list(split_batch([torch.zeros(3), torch.zeros(4)], 2))


@pytest.mark.parametrize("precision", ["bf16-autocast", "fp16-autocast"])
def test_autocast_surrounds_the_forward_pass(precision):
    seen = []

    def loss(model, batch):
        out = model(batch[0])
        seen.append(out.dtype)
        return F.cross_entropy(out.float(), batch[1])

    workload = Workload(name="autocast", model=MLP, batch=mlp().batch, loss=loss, precision=precision)
    step = build_step(workload, device="cpu")
    step.run()
    assert seen == [torch.bfloat16 if precision.startswith("bf16") else torch.float16]
    assert (step.scaler is not None) == (precision == "fp16-autocast")
    assert all(parameter.dtype == torch.float32 for parameter in step.model.parameters())


def test_factories_may_take_a_size():
    sizes = []

    def model(size="full"):
        sizes.append(size)
        return MLP()

    workload = Workload(name="sized", model=model, batch=mlp().batch, loss=classify)
    build_step(workload, device="cpu", size="small")
    build_step(workload, device="cpu")
    assert sizes == ["small", "full"]
    assert takes_size(workload) and not takes_size(mlp())


def test_frozen_parameters_are_not_the_optimizers():
    def model():
        net = MLP()
        net.net[0].requires_grad_(False)
        return net

    step = build_step(Workload(name="frozen", model=model, batch=mlp().batch, loss=classify), device="cpu")
    trained = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in step.model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": lambda: 3}, UsageError, "must return a torch.nn.Module, not int"),
        (
            {"optimizer": lambda parameters: None},
            UsageError,
            "must return a torch.optim.Optimizer, not NoneType",
        ),
        ({"optimizer": torch.optim.LBFGS}, UsageError, "LBFGS, whose step needs a closure"),
        ({"loss": lambda model, batch: 1.0}, WorkloadFailed, "not float"),
        ({"loss": lambda model, batch: model(batch[0])}, WorkloadFailed, r"not a tensor of shape \(64, 10\)"),
        ({"loss": lambda model, batch: torch.tensor(1.0)}, WorkloadFailed, "requires a gradient"),
        ({"model": nn.Identity}, WorkloadFailed, "no parameter that requires a gradient"),
    ],
)
def test_a_workload_that_is_none_is_told_so(change, error, text):
    parts = {"name": "odd", "model": MLP, "batch": mlp().batch, "loss": classify} | change
    with pytest.raises(error, match=text):
        build_step(Workload(**parts), device="cpu").run()
