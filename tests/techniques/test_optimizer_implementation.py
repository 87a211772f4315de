"""Another implementation of an optimizer that exists already: its flags, its state, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import OptimizerImplementation, undo

WITH_FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
FLAGS = {"fused": (True, False), "foreach": (False, True), "for-loop": (False, False)}


def _made(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}]
    return model, kind(groups, lr=0.01, **settings)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> list[Tensor]:
    for number in range(count):
        torch.manual_seed(number)
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("implementation", FLAGS)
@pytest.mark.parametrize("kind", WITH_FUSED)
@pytest.mark.parametrize("when", ["new", "with state"])
def test_steps_agree_and_the_state_is_kept(kind: Any, implementation: Any, when: str) -> None:
    model, optimizer = _made(kind)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    if when == "with state":
        _steps(model, optimizer), _steps(other, other_optimizer)
    OptimizerImplementation(implementation=implementation).apply(model, optimizer)
    assert all((g["fused"], g["foreach"]) == FLAGS[implementation] for g in optimizer.param_groups)
    ours, theirs = _steps(model, optimizer), _steps(other, other_optimizer)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    undo(model)
    assert [g["fused"] for g in optimizer.param_groups] == [g["fused"] for g in other_optimizer.param_groups]
    for a, b in zip(_steps(model, optimizer), _steps(other, other_optimizer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_new_groups_follow() -> None:
    model, optimizer = _made()
    OptimizerImplementation(implementation="fused").apply(model, optimizer)
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert optimizer.param_groups[-1]["fused"] is True


def test_a_scaler_is_told_that_a_fused_step_unscales_by_itself() -> None:
    model, optimizer = _made()
    OptimizerImplementation(implementation="fused").apply(model, optimizer)
    assert vars(optimizer)["_step_supports_amp_scaling"] is True
    undo(model)
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    made_fused = _made(fused=True)
    OptimizerImplementation(implementation="for-loop").apply(*made_fused)
    assert "_step_supports_amp_scaling" not in vars(made_fused[1])
    undo(made_fused[0])
    assert vars(made_fused[1])["_step_supports_amp_scaling"] is True


@pytest.mark.parametrize(
    ("kind", "implementation", "words"),
    [
        (torch.optim.RMSprop, "fused", "RMSprop has no fused implementation; it has foreach"),
        (torch.optim.NAdam, "fused", "NAdam has no fused implementation"),
        (torch.optim.SparseAdam, "foreach", "SparseAdam has no foreach implementation; it has one only"),
        (torch.optim.SparseAdam, "for-loop", "SparseAdam has no for-loop implementation"),
    ],
)
def test_optimizers_without_it_are_refused(kind: Any, implementation: Any, words: str) -> None:
    model, optimizer = _made(kind)
    with pytest.raises(UsageError, match=words):
        OptimizerImplementation(implementation=implementation).apply(model, optimizer)


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match=r"apply\(model, optimizer\)"):
        OptimizerImplementation().apply(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="one of fused, foreach, for-loop, not 'apex'"):
        OptimizerImplementation(implementation="apex")  # type: ignore[arg-type]
    model, optimizer = _made(differentiable=True)
    with pytest.raises(UsageError, match="differentiable=True"):
        OptimizerImplementation(implementation="foreach").apply(model, optimizer)
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match=r"floating-point parameters on .*float32 on meta"):
        OptimizerImplementation().apply(model, torch.optim.AdamW(model.parameters()))
