"""Adapters in place of the weights: what trains, what it takes, what merging gives, and the way back."""

from __future__ import annotations

import doctest

import pytest
import torch
from technique_models import CASES, GPT
from torch import nn

from memfit.capture import capture_step
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.techniques import GradientCheckpointing, LoRA, QLoRA, lora, undo
from memfit.techniques.lora import nf4_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 4)
    )


def _trained(technique: LoRA, steps: int = 20) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    net = _net()
    groups = [
        {"params": net[0].parameters(), "lr": 1e-2},
        {"params": [p for m in net[2:] for p in m.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    technique.apply(net, optimizer)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = (net(torch.randn(16, 64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return net, optimizer, losses


@pytest.mark.parametrize("kind", [LoRA, QLoRA])
def test_adapters_train_and_merge_into_the_weights(kind: type[LoRA]) -> None:
    technique = kind(rank=4, targets=("0", "2"), train=("4.*",))
    net, optimizer, losses = _trained(technique)
    assert losses[-1] < 0.2 * losses[0]
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert trained == [
        *(f"{layer}.lora_{half}.default.weight" for layer in "02" for half in "AB"),
        "4.weight",
        "4.bias",
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 0]
    assert sum(p.numel() for p in net[0].parameters() if p.requires_grad) == 4 * (64 + 256)
    x = torch.randn(32, 64)
    expected = net(x)
    technique.merge(net)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
    plain = _net()
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in net.modules()] == [type(m) for m in plain.modules()]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 6]
    assert all(p.requires_grad for p in net.parameters())
    with pytest.raises(UsageError, match="merge what was applied last"):
        technique.merge(net)


@pytest.mark.parametrize("kind", [LoRA, QLoRA])
def test_undo_gives_the_model_back_after_training(kind: type[LoRA]) -> None:
    net, _, _ = _trained(kind(rank=2, targets=("0", "2")), steps=3)
    undo(net)
    for (name, a), b in zip(net.state_dict().items(), _net().state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_quantized_weights_have_the_bytes_that_are_said_and_the_error_of_nf4() -> None:
    net = _net()
    x, plain = torch.randn(32, 64), _net()
    QLoRA(rank=2, targets=("0", "2")).apply(net)
    for layer, elements in ((net[0], 64 * 256), (net[2], 256 * 64)):
        weight = layer.base_layer.weight
        state = weight.quant_state
        parts = (weight, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset)
        assert sum(part.nbytes for part in parts) == nf4_bytes(elements)
    error = (net(x) - plain(x)).norm() / plain(x).norm()
    assert 0.001 < float(error.detach()) < 0.15


def test_the_estimate_is_the_capture_of_the_adapted_step() -> None:
    """At rest: the frozen weights' gradients and moments are gone, the adapters' are there."""
    batch, loss = CASES["gpt"].batch, CASES["gpt"].loss
    technique = LoRA(rank=2)

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return technique.apply(GPT())

    plain = capture_step(Workload(name="gpt", model=CASES["gpt"].model, batch=batch, loss=loss))
    real = capture_step(Workload(name="lora", model=adapted, batch=batch, loss=loss))
    saving = technique.estimate(plain, CASES["gpt"].model())
    assert saving.resting_bytes == pytest.approx(plain.resting_bytes - real.resting_bytes, rel=0.01)
    assert saving.peak_bytes == pytest.approx(plain.peak_bytes - real.peak_bytes, rel=0.1)
    assert QLoRA(rank=2).estimate(plain, CASES["gpt"].model()).resting_bytes > saving.resting_bytes


def test_every_linear_layer_but_the_output_and_tied_ones_is_a_target() -> None:
    model = GPT()
    assert {name.rpartition(".")[2] for name in LoRA().target_layers(model)} == {"qkv", "out", "up", "down"}
    assert set(LoRA(targets=("h.0.*",)).target_layers(model)) == {
        f"h.0.{n}" for n in ("qkv", "out", "up", "down")
    }
    with pytest.raises(UsageError, match="'q_proj' fits no linear layer; there are down, head, out, qkv, up"):
        LoRA(targets=("q_proj",)).apply(model)
    with pytest.raises(UsageError, match="has no linear layer"):
        LoRA().apply(nn.Sequential(nn.Conv2d(1, 1, 1)))
    for bad in ({"rank": 0}, {"targets": "q"}, {"dropout": 1.0}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            LoRA(**bad)


def test_adapters_under_checkpointing_get_their_gradients() -> None:
    """A frozen embedding feeds recomputed blocks in which only adapters train."""
    gradients = []
    for checkpointed in (False, True):
        model = CASES["gpt"].model()
        torch.manual_seed(0)
        LoRA(rank=2).apply(model)
        if checkpointed:
            GradientCheckpointing().apply(model)
        torch.manual_seed(1)
        CASES["gpt"].loss(model, CASES["gpt"].batch()).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(gradients[0]) == 24
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_docstrings() -> None:
    result = doctest.testmod(lora)
    assert result.attempted and not result.failed
