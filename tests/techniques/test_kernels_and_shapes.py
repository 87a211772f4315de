"""Attention kernels, layouts, padded vocabularies, compiled models: what runs, and that it is the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from technique_models import CASES
from torch import Tensor, nn

from memfit import AttentionBackend, ChannelsLast, InputError, UsageError, VocabularyPadding, undo, warm_up
from memfit.techniques import GradientCheckpointing
from memfit.techniques.attention_forward import kernels_that_run


class Attention(nn.Module):
    """Heads of 12: no multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(48, 144)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 12).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


FLASH, MATH = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"


def test_the_kernel_that_is_asked_for_runs() -> None:
    model, x = Attention(), torch.randn(2, 7, 48)
    assert kernels_that_run(model, x) == {FLASH}
    AttentionBackend(backend="math").apply(model)
    assert FLASH not in kernels_that_run(model, x)
    undo(model)
    assert kernels_that_run(model, x) == {FLASH}


def test_what_cannot_run_here_falls_back_or_says_so() -> None:
    x = torch.randn(2, 7, 48)
    AttentionBackend(backend="cudnn").apply(model := Attention())
    assert model(x).shape == (2, 4, 7, 12)
    AttentionBackend(backend="cudnn", fallback=False).apply(model := Attention())
    with pytest.raises(RuntimeError, match="No viable backend|No available kernel"):
        model(x)


def test_padded_heads_give_the_same_result_and_gradients() -> None:
    """The scale is that of the true width; the kernel sees 16."""
    x = torch.randn(2, 7, 48)
    results = []
    for technique in (None, AttentionBackend(backend="flash", pad_heads_to=16)):
        model = Attention()
        widths: list[int] = []
        if technique is not None:
            technique.apply(model)
        with _watched(widths):
            out = model(x)
        out.square().sum().backward()
        results.append((out.detach(), model.qkv.weight.grad, widths))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][2] == [12] and results[1][2] == [16]


def _watched(widths: list[int]):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in func.name():
                widths.append(args[0].shape[-1])
            return func(*args, **(kwargs or {}))

    return Watch()


def test_recomputed_blocks_choose_the_same_kernel() -> None:
    case = CASES["gpt"]
    model = case.model().eval()  # no dropout: flash would do
    AttentionBackend(backend="math").apply(model)
    GradientCheckpointing().apply(model)
    loss = case.loss(model, case.batch())
    seen: list[int] = []
    with _watched(seen):
        loss.backward()
    assert seen == []
    undo(model)
    undo(model)
    GradientCheckpointing().apply(model)
    with pytest.raises(UsageError, match="before gradient_checkpointing"):
        AttentionBackend().apply(model)


def test_channels_last_lays_out_weights_gradients_and_state() -> None:
    model = CASES["cnn"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    CASES["cnn"].loss(model, CASES["cnn"].batch()).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    ChannelsLast().apply(model, optimizer)
    weight = model.layer1[0].conv1.weight
    for tensor in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    undo(model)
    assert weight.is_contiguous() and optimizer.state[weight]["exp_avg"].is_contiguous()
    with pytest.raises(UsageError, match="no convolution|no 2-d"):
        ChannelsLast().apply(nn.Sequential(nn.Linear(2, 2)))


def test_a_padded_vocabulary_trains_as_the_true_one_and_saves_it() -> None:
    case = CASES["gpt"]
    runs = []
    for technique in (None, VocabularyPadding(multiple=64)):
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if technique is not None:
            technique.apply(model, optimizer)
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            loss = case.loss(model, case.batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        runs.append((model, optimizer, losses))
    (plain, _, expected), (model, optimizer, losses) = runs
    assert losses == pytest.approx(expected, rel=1e-5)
    assert model.head.weight.shape == (128, 32) and model.head.weight is model.embed.weight
    assert not model.head.weight[97:].any()
    state = model.state_dict()
    assert state["head.weight"].shape == state["embed.weight"].shape == (97, 32)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.head.weight[:97], plain.head.weight) and not model.head.weight[97:].any()
    undo(model)
    assert model.head.weight.shape == optimizer.state[model.head.weight]["exp_avg"].shape == (97, 32)


def test_service_compiles_nothing_and_new_shapes_are_remembered(tmp_path: Path) -> None:
    torch._dynamo.reset()
    file = tmp_path / "shapes.json"
    model = nn.Linear(4, 2)
    served = warm_up(model, torch.randn, shapes=[(1, 4), (3, 4)], shape_file=file, backend="eager")
    assert served.compilations == 2 and served.recompilations == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(served(x), model(x).detach())
    served(torch.randn(1, 4))
    assert served.recompilations == 0 and served.unexpected == {}
    served(torch.randn(5, 4))
    assert served.recompilations == 1 and served.unexpected == {(5, 4): 1}
    torch._dynamo.reset()  # the process starts anew
    again = warm_up(nn.Linear(4, 2), torch.randn, shape_file=file, backend="eager")
    assert again.warmed == ((1, 4), (3, 4), (5, 4))
    again(torch.randn(5, 4))
    assert again.recompilations == 0
    file.write_text("{}")
    with pytest.raises(InputError, match="delete it"):
        warm_up(model, torch.randn, shape_file=file, backend="eager")
    with pytest.raises(UsageError, match="name shapes"):
        warm_up(model, torch.randn, backend="eager")
