"""Weights in bf16 only: small updates stay, and with the split they are fp32's to the bit."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from memfit.capture import capture_step
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.techniques import LowMemoryOptimizer, MixedPrecisionTraining, bf16_weights, undo, undo_all
from memfit.techniques.bf16_weights import join_bits, round_stochastically, split_bits

LR, STEPS = 6e-4, 100


@settings(max_examples=50, deadline=None, derandomize=True)
@given(arrays.arrays("float32", 32, elements=st.floats(width=32, allow_nan=False, allow_subnormal=True)))
def test_no_bit_is_lost_between_splitting_and_joining(values: Any) -> None:
    weight = torch.from_numpy(values)
    high, low = split_bits(weight)
    assert torch.equal(join_bits(high, low).view(torch.int32), weight.view(torch.int32))
    assert bool(
        ((high.float() - weight).abs() <= weight.abs() * 2.0**-8 + 1e-38).logical_or(high.isinf()).all()
    )


def test_rounding_at_random_is_right_on_average() -> None:
    weight = torch.full((200_000,), 1.0 + 0.3 * 2.0**-7)
    rounded = round_stochastically(weight, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.005)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.3e38])
    assert torch.equal(round_stochastically(odd, torch.Generator()).isfinite(), odd.bfloat16().isfinite())


class _Scale(nn.Module):
    """768 weights near one, as a layer norm's are; no norm by type, so that they do go to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(768)), nn.Parameter(torch.zeros(768))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (768,)).to(self.weight.dtype) * self.weight + self.bias


def _trained(optimizer: Any = torch.optim.AdamW, steps: int = STEPS, **how: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net, x, y = _Scale(), torch.randn(32, 768), torch.randn(32, 768)
    optimizer = optimizer(net.parameters(), lr=LR, weight_decay=0.0)
    if how:
        MixedPrecisionTraining(precision="bf16", weights="bf16", **how).apply(net, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x).float(), y).backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("rounding", ["split", "kahan", "stochastic", "nearest"])
def test_updates_smaller_than_the_spacing_of_bf16_do_not_vanish(rounding: str) -> None:
    full, _ = _trained()
    net, optimizer = _trained(rounding=rounding)
    assert (
        net.weight.dtype == torch.bfloat16 and optimizer.state[net.weight]["exp_avg"].dtype == torch.bfloat16
    )
    if rounding == "nearest":
        assert bool((net.weight == 1).all()), "as a plain cast: every update was lost"
        return
    undo(net)
    moved, fully = (model.weight.detach() - 1 for model in (net, full))
    assert float(moved.abs().mean()) == pytest.approx(float(fully.abs().mean()), rel=0.01)
    assert float((moved - fully).abs().mean()) < (0.015 if rounding == "stochastic" else 0.0003)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about kernels that are not found without a GPU
@pytest.mark.parametrize(
    ("first", "backend"), [("weights", "bitsandbytes"), ("state", "bitsandbytes"), ("weights", "torchao")]
)
def test_small_updates_stay_under_8_bit_state_too(backend: Any, first: str) -> None:
    """The state is that of 8-bit AdamW over fp32 weights: no scale or table of it is rounded to bf16."""
    pytest.importorskip(backend)
    moved, states = [], []
    small = LowMemoryOptimizer(backend=backend)
    low = MixedPrecisionTraining(precision="bf16", weights="bf16", rounding="kahan")
    for techniques in ((), (small,), (low, small) if first == "weights" else (small, low)):
        torch.manual_seed(0)
        net, target = nn.Linear(64, 96, bias=False), torch.randn(32, 96)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
        for technique in techniques:
            technique.apply(net, optimizer)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(torch.randn(32, 64)).float(), target).backward()
            optimizer.step()
        assert net.weight.dtype == (torch.bfloat16 if low in techniques else torch.float32)
        state = optimizer.state[net.weight]
        states.append({k: (type(v), v.dtype) for k, v in state.items() if isinstance(v, Tensor)})
        undo_all(net)
        moved.append(net.weight.detach() - 1)
    assert states[2] == states[1] != states[0]
    errors = [float((each - moved[0]).abs().mean() / moved[0].abs().mean()) for each in moved[1:]]
    assert errors[0] < 0.05 and errors[1] < 0.1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_split_with_fp32_moments_is_an_fp32_master_copy_to_the_bit(kind: Any) -> None:
    """The independent truth: fp32 weights stepped by PyTorch with the gradients of their bf16 copies."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 768), torch.randn(32, 768)
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    net, copy_, master = _Scale(), _Scale().bfloat16(), _Scale()
    ours, theirs = (kind(m.parameters(), lr=LR, weight_decay=0.1, **extra) for m in (net, master))
    technique = MixedPrecisionTraining(precision="bf16", weights="bf16", moments="fp32")
    technique.apply(net, ours)
    for _ in range(20):
        for model in (net, copy_):
            model.zero_grad()
            nn.functional.mse_loss(model(x).float(), y).backward()
        for p, q in zip(master.parameters(), copy_.parameters(), strict=True):
            p.grad = q.grad.float()
        ours.step()
        theirs.step()
        with torch.no_grad():
            for p, q in zip(master.parameters(), copy_.parameters(), strict=True):
                q.copy_(split_bits(p)[0])
    undo(net)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), master.parameters(), strict=True))
    for a, b in zip(net.parameters(), master.parameters(), strict=True):
        for name, value in theirs.state[b].items():
            assert torch.equal(ours.state[a][name], value), name


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_large_weights_are_stepped_slice_by_slice(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (1 << 22, 100):
        monkeypatch.setattr(bf16_weights, "PIECE", piece)
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        net, optimizer = _trained(functools.partial(kind, **extra), steps=5, rounding="split", moments="fp32")
        states = [s[name] for s in optimizer.state.values() for name in sorted(s)]
        results.append([*net.parameters(), *states])
        undo(net)
        results[-1] += list(net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
@pytest.mark.parametrize("model_first", [True, False])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    rounding: str, model_first: bool
) -> None:
    net, optimizer = _trained(rounding=rounding, moments="fp32", steps=6)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    again, other = _trained(rounding=rounding, moments="fp32", steps=0)
    loads = [lambda: again.load_state_dict(saved[0]), lambda: other.load_state_dict(saved[1])]
    for load in loads if model_first else reversed(loads):
        load()
    for model, steps in ((net, optimizer), (again, other)):
        torch.manual_seed(3)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 768)).float().square().mean().backward()
            steps.step()
    undo(net)
    undo(again)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_weights_set_from_outside_count() -> None:
    """What was kept beside a weight belongs to that weight only."""
    net, optimizer = _trained(rounding="split", steps=3)
    with torch.no_grad():
        net.weight.fill_(2.0)
        net.weight.grad = torch.zeros_like(net.weight)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    undo(net)
    assert bool((net.weight == 2).all())


def test_the_estimate_states_the_bytes_and_what_is_lost() -> None:
    """1,536 weights and their moments, as plain PyTorch has them: 6,144 + 12,288 bytes in fp32."""
    torch.manual_seed(0)
    graph = capture_step(
        Workload(
            name="s", model=_Scale, batch=lambda: torch.randn(32, 768), loss=lambda m, x: m(x).square().mean()
        )
    )
    counters = 2 * 4
    for rounding, weights in (("nearest", 3072), ("stochastic", 3072), ("kahan", 6144), ("split", 6144)):
        technique = MixedPrecisionTraining(precision="bf16", weights="bf16", rounding=rounding)
        saving = technique.estimate(graph)
        assert saving.resting_bytes == 6144 + 12288 - weights - 6144
        assert ("0.2 to 0.4 % of a weight are lost" in saving.note) == (rounding == "nearest")
        net = _Scale()
        optimizer = torch.optim.AdamW(net.parameters())
        technique.apply(net, optimizer)
        net(torch.randn(2, 768)).sum().backward()
        optimizer.step()
        held = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        rests = optimizer.state_dict()["memfit_bf16_weights"]["rests"]
        assert (
            sum(t.nbytes for t in (*held, *(r for r in rests if r is not None))) == weights + 6144 + counters
        )


def test_gradients_that_are_there_already_are_refused() -> None:
    net = _Scale()
    net(torch.randn(2, 768)).sum().backward()
    with pytest.raises(UsageError, match="set_to_none=True"):
        MixedPrecisionTraining(precision="bf16", weights="bf16").apply(
            net, torch.optim.AdamW(net.parameters())
        )
    assert net.weight.dtype == torch.float32
