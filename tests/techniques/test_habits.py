"""What people do with a model while a technique is on, for every technique of the table."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from technique_models import GPT
from test_contract import VARIANTS
from test_pairs import EACH, NAMES, SLOW, Everything, _batch, _loss
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import (
    LoRA,
    OptimizerInBackward,
    Technique,
    applied_techniques,
    mixed_precision_of,
    undo,
)
from memfit.techniques.replaced_forward import ReplacedForward

FROZEN_INPUT = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
"""PyTorch's words where a block's input needs no gradient, as under adapters."""
OF_16_BITS = {
    "fp16": "weights in bf16 do not go with precision 'fp16'",
}
"""Why a technique does not take a model that is in bf16 itself."""


def _applied(name: str, model: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer, Technique]:
    torch.manual_seed(0)
    made = Everything() if model is None else model
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, foreach=False)
    technique = dataclasses.replace(VARIANTS[name])
    technique.apply(made, optimizer)
    return made, optimizer, technique


def _backward(model: nn.Module, loss: Tensor) -> None:
    mixed = mixed_precision_of(model)
    (loss if mixed is None else mixed.scale_loss(loss)).backward()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    loss = _loss(model, _batch())
    _backward(model, loss)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), *(p.detach().clone() for p in model.parameters())]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", EACH)
def test_a_model_in_bf16_and_a_batch_of_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = Everything().bfloat16()
    if name in OF_16_BITS:
        with pytest.raises(UsageError, match=OF_16_BITS[name]):
            _applied(name, model)
        return
    model, optimizer, technique = _applied(name, model)
    logits = model(torch.zeros(0, 10, dtype=torch.long))
    assert logits.shape == (0, 10, 40)
    _backward(model, logits.sum())
    optimizer.step()
    optimizer.zero_grad()
    assert all(bool(value.isfinite().all()) for value in _step(model, optimizer))
    assert undo(model) is technique
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", EACH)
def test_training_goes_on_from_a_checkpoint_to_the_bit(name: str) -> None:
    if name == "qlora":
        pytest.skip("bitsandbytes loads its 4-bit weights by from_prequantized only: save the adapters")
    first, optimizer, _ = _applied(name)
    _step(first, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    runs = []
    for again in (True, False):
        if again:
            model, stepped, _ = _applied(name)
        else:
            model, stepped = first, optimizer
        model.load_state_dict(saved[0])
        stepped.load_state_dict(copy.deepcopy(saved[1]))
        torch.manual_seed(7)
        runs.append(_step(model, stepped) + _step(model, stepped))
    assert _same(*runs)


@FROZEN_INPUT
@pytest.mark.parametrize("name", EACH)
def test_a_step_after_one_that_failed_is_as_if_it_had_not_been(name: str) -> None:
    if name in SLOW:
        pytest.skip("compiled graphs know the hooks of when they were compiled: none of this test's runs")
    runs = []
    for fails in (False, True):
        model, optimizer, technique = _applied(name)
        _step(model, optimizer)
        if fails:
            _fail(model, optimizer, in_backward=not isinstance(technique, OptimizerInBackward))
        torch.manual_seed(4)
        runs.append(_step(model, optimizer))
    assert _same(*runs)


def _fail(model: Any, optimizer: torch.optim.Optimizer, in_backward: bool) -> None:
    """An exception in the forward pass of a block, and in the backward pass of one before it."""

    def raises(*args: Any) -> None:
        raise KeyError("a fault of the user's")

    ways = [model.h[1].register_forward_pre_hook, model.h[0].register_full_backward_hook]
    for register in ways if in_backward else ways[:1]:
        place = register(raises)
        with pytest.raises(KeyError):
            _backward(model, _loss(model, _batch()))
        place.remove()
        optimizer.zero_grad()
        if (mixed := mixed_precision_of(model)) is not None:
            mixed.forget_gradients()


@FROZEN_INPUT
@pytest.mark.parametrize("name", EACH)
def test_hooks_run_once_and_nothing_is_held_when_the_model_is_dropped(name: str) -> None:
    model, optimizer, technique = _applied(name)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    seen: list[str] = []
    model.h[0].register_forward_hook(lambda *args: seen.append("forward"))
    model.h[0].register_full_backward_hook(lambda *args: seen.append("backward"))
    model.head.register_forward_hook(lambda *args: seen.append("head"))
    for _ in range(2):
        _step(model, optimizer)
        scheduler.step()
    assert seen == ["forward", "head", "backward"] * 2
    alive = [weakref.ref(model.h[0]), weakref.ref(optimizer)]
    del model, optimizer, scheduler, technique
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_put_on_top_is_told_with_the_technique_below(name: str) -> None:
    model, _, technique = _applied(name)
    replaced = [m for m in model.modules() if isinstance(vars(m).get("forward"), ReplacedForward)]
    forwards = [vars(m)["forward"] for m in replaced]
    if not replaced:
        assert undo(model) is technique
        return
    top = replaced[-1]
    below, top.forward = top.forward, lambda *args, **kwargs: None
    for _ in range(2):
        with pytest.raises(UsageError, match="take that replacement back first") as refused:
            undo(model)
        assert technique.name in str(refused.value).replace(" ", "_")
        assert [vars(m).get("forward") for m in replaced[:-1]] == forwards[:-1], "nothing was taken back"
    assert applied_techniques(model) == (technique,)
    top.forward = below
    assert undo(model) is technique
    assert not any(isinstance(vars(m).get("forward"), ReplacedForward) for m in model.modules())


def test_steps_in_the_backward_pass_notice_that_gradients_come_back(one_process_group: None) -> None:
    """DistributedDataParallel writes them after the parameters were stepped: a second step, in silence."""
    model = GPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    OptimizerInBackward().apply(model, optimizer)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(torch.zeros(1, 4, dtype=torch.long)).mean().backward()
    with pytest.raises(UsageError, match="DistributedDataParallel gives them back; use FSDP"):
        optimizer.step()


def test_adapters_over_4_bit_weights_survive_an_evaluation() -> None:
    """bitsandbytes lays out 4-bit weights anew in evaluation on some CPUs, in place."""
    pytest.importorskip("bitsandbytes")
    model, optimizer, technique = _applied("qlora", GPT(width=64, layers=1))
    _step(model, optimizer)
    before, ids = copy.deepcopy(model.h[0].up.base_layer.weight.data), _batch()["ids"]
    model.eval()
    with torch.no_grad():
        adapted = model(ids)
    assert torch.equal(model.h[0].up.base_layer.weight.data, before)
    assert isinstance(technique, LoRA)
    merged = technique.merge(model)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids), adapted, rtol=1e-3, atol=1e-3)
