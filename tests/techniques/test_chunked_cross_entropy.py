"""Chunked linear + cross entropy against PyTorch's own, in float64; and every way in which logits are
used."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from technique_models import CASES, GPT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import CannotRunHere, UsageError
from memfit.techniques import ChunkedCrossEntropy, LoRA, undo
from memfit.techniques.chunked_cross_entropy import find_output_layer
from memfit.techniques.deferred_logits import DeferredLogits
from memfit.techniques.linear_cross_entropy import LossTerms, linear_cross_entropy

CLASSES = 97


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "chunks"), [(37, 5), (8, 8), (3, 8), (16, 1)])
def test_against_pytorch(
    dtype: torch.dtype, tolerance: float, reduction: Any, rows: int, chunks: int
) -> None:
    for bias, smoothing, weighted, ignored in itertools.product((0, 1), (0.0, 0.1), (0, 1), (0, 1)):
        hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
        weight = torch.randn(CLASSES, 16, dtype=dtype, requires_grad=True)
        offset = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if bias else None
        target = torch.randint(0, CLASSES, (rows,))
        target[:: 3 if ignored else rows + 1] = -100 if ignored else target[0]
        class_weight = torch.rand(CLASSES, dtype=dtype) if weighted else None
        inputs = [t for t in (hidden, weight, offset) if t is not None]
        outer = torch.randn(rows if reduction == "none" else (), dtype=dtype)

        plain = F.cross_entropy(
            F.linear(hidden, weight, offset),
            target,
            weight=class_weight,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        terms = LossTerms(compute_dtype=dtype, chunks=chunks, reduction=reduction, label_smoothing=smoothing)
        ours = linear_cross_entropy(hidden, weight, offset, target, terms=terms, class_weight=class_weight)
        expected = torch.autograd.grad(plain, inputs, outer)
        first = torch.autograd.grad(ours, inputs, outer, retain_graph=True)
        second = torch.autograd.grad(ours, inputs, outer)
        for a, b in zip((plain, *expected, *expected), (ours, *first, *second), strict=True):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def test_all_rows_ignored_is_as_in_pytorch() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    target = torch.full((5,), -100)
    terms = LossTerms(compute_dtype=torch.float32, chunks=2)
    loss = linear_cross_entropy(hidden, weight, None, target, terms=terms)
    loss.backward()
    assert loss.isnan() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden = torch.randn(5, 4, requires_grad=frozen != "hidden")
    weight = torch.randn(6, 4, requires_grad=frozen != "weight")
    terms = LossTerms(compute_dtype=torch.float32, chunks=2)
    linear_cross_entropy(hidden, weight, None, torch.arange(5), terms=terms).backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")


class _LM(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(classes, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, classes, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(self.embed(ids))))


class _OwnLoss(torch.autograd.Function):
    """A user's own kernel: it goes round everything that a tensor subclass can see."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * grad * logits / logits.numel()


IDS = (torch.arange(48).view(4, 12) * 31) % CLASSES
TARGET = (IDS * 7 + 3) % CLASSES


def _changed_in_place(logits: Tensor) -> Tensor:
    flat = logits.view(-1, CLASSES)
    logits[..., 0] = -1e4
    return F.cross_entropy(flat, TARGET.flatten())


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "flatten": (lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()), True),
    "flatten end": (lambda x: F.cross_entropy(torch.flatten(x, end_dim=-2), TARGET.flatten()), True),
    "view": (lambda x: F.cross_entropy(x.view(-1, x.size(-1)), TARGET.view(-1)), True),
    "reshape": (lambda x: F.cross_entropy(x.reshape(x.shape[0] * 12, CLASSES), TARGET.reshape(-1)), True),
    "shifted": (
        lambda x: F.cross_entropy(
            x[..., :-1, :].contiguous().view(-1, CLASSES).float(), TARGET[:, 1:].flatten()
        ),
        True,
    ),
    "shifted, in two": (lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten()), True),
    "transposed": (lambda x: F.cross_entropy(x.transpose(1, 2), TARGET), True),
    "permuted, smoothed": (lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGET, label_smoothing=0.1), True),
    "masked rows": (lambda x: F.cross_entropy(x[TARGET > 40], TARGET[TARGET > 40]), True),
    "chosen rows": (lambda x: F.cross_entropy(x[[0, 2], [3, 5]], TARGET[[0, 2], [3, 5]]), True),
    "one sample": (lambda x: F.cross_entropy(x[0], TARGET[0]), True),
    "module": (lambda x: nn.CrossEntropyLoss(ignore_index=5)(x.view(-1, CLASSES), TARGET.view(-1)), True),
    "sum, weighted": (
        lambda x: F.cross_entropy(
            x.flatten(0, 1), TARGET.flatten(), torch.linspace(0, 1, CLASSES).to(x.dtype), reduction="sum"
        ),
        True,
    ),
    "per token": (
        lambda x: (F.cross_entropy(x.mT, TARGET, reduction="none") * torch.linspace(0, 1, 12)).sum(),
        False,
    ),
    "per token, flat": (
        lambda x: (
            F.cross_entropy(x.flatten(0, 1), TARGET.flatten(), reduction="none") * torch.linspace(0, 1, 48)
        ).sum(),
        True,
    ),
    "to device and dtype": (
        lambda x: F.cross_entropy(x.to("cpu").to(torch.float32).flatten(0, 1), TARGET.flatten()),
        True,
    ),
    "log softmax": (lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), TARGET.flatten()), False),
    "soft cap": (lambda x: F.cross_entropy((3 * torch.tanh(x / 3)).flatten(0, 1), TARGET.flatten()), False),
    "changed in place": (_changed_in_place, False),
    "soft targets": (
        lambda x: F.cross_entropy(x.flatten(0, 1), F.one_hot(TARGET.flatten(), CLASSES).float()),
        False,
    ),
    "part of the vocabulary": (
        lambda x: F.cross_entropy(x[..., :50].flatten(0, 1), TARGET.flatten() % 50),
        False,
    ),
    "own function": (lambda x: _OwnLoss.apply(x), False),
    "own function on a view": (lambda x: _OwnLoss.apply(x.transpose(1, 2)), False),
    "accuracy beside": (
        lambda x: (
            F.cross_entropy(x.flatten(0, 1), TARGET.flatten()) + 0 * (x.argmax(-1) == TARGET).float().mean()
        ),
        True,
    ),
    "detached beside": (
        lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()) * (1 + 0 * x.detach().norm()),
        True,
    ),
    "z-loss": (
        lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()) + 1e-2 * x.logsumexp(-1).square().mean(),
        True,
    ),
}


class _Largest(TorchDispatchMode):
    """The most rows of logits (tensors whose last dimension is the vocabulary) that any operation made."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.classes, self.rows = classes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DeferredLogits) and tensor.dim():
                self.rows = max(
                    self.rows, tensor.numel() // self.classes * (tensor.shape[-1] == self.classes)
                )
        return out


@pytest.mark.parametrize("name", LOSSES)
def test_every_use_of_the_logits_is_right(name: str) -> None:
    loss_of, _ = LOSSES[name]
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = _LM().double()
        if on:
            ChunkedCrossEntropy(chunks=6).apply(model)
        loss = loss_of(model(IDS).to(torch.float64))
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6 if name == "shifted" else 1e-9, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, (_, chunked) in LOSSES.items() if chunked])
def test_the_logits_never_exist(name: str) -> None:
    beside = name in ("accuracy beside", "detached beside", "z-loss")
    model = ChunkedCrossEntropy(chunks=6).apply(_LM())
    with _Largest() as largest:
        LOSSES[name][0](model(IDS)).backward()
    assert (largest.rows < IDS.numel()) != beside


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.language])
def test_losses_of_transformers_are_chunked(case: str) -> None:
    model, batch = CASES[case].model(), CASES[case].batch()
    _, layer = find_output_layer(model) or (None, None)
    assert layer is not None
    tokens = next(iter(batch.values())).numel()
    ChunkedCrossEntropy(chunks=4).apply(model)
    with _Largest(layer.out_features) as largest:
        CASES[case].loss(model, batch).backward()
    assert 0 < largest.rows < tokens


def test_what_the_stand_in_says_of_itself() -> None:
    model = ChunkedCrossEntropy().apply(_LM())
    logits = model(IDS)
    assert isinstance(logits, DeferredLogits) and isinstance(logits, Tensor)
    assert (
        logits.shape == (4, 12, CLASSES) and logits.size(-1) == CLASSES and logits.dim() == logits.ndim == 3
    )
    assert (logits.dtype, logits.device.type, logits.numel()) == (torch.float32, "cpu", 48 * CLASSES)
    assert logits.requires_grad and logits.grad_fn is not None and len(logits) == 4
    assert logits[:, -1].shape == (4, CLASSES) and logits.transpose(1, 2).shape == (4, CLASSES, 12)
    plain = F.linear(torch.relu(model.mid(model.embed(IDS))), model.head.weight)
    assert torch.equal(logits + 0, plain) and "grad_fn" in repr(logits)
    assert not logits.detach().requires_grad and torch.equal(logits.detach(), plain)


def test_without_gradients_logits_are_logits() -> None:
    model = ChunkedCrossEntropy().apply(_LM())
    with torch.no_grad():
        assert type(model(IDS)) is Tensor
    model.requires_grad_(False)
    assert type(model(IDS)) is Tensor


def test_logits_looked_at_without_gradients_can_still_be_trained_on() -> None:
    model = ChunkedCrossEntropy().apply(_LM())
    logits = model(IDS)
    with torch.no_grad():
        logits.argmax(-1)
    F.cross_entropy(logits.flatten(0, 1), TARGET.flatten()).backward()
    assert model.mid.weight.grad is not None


@pytest.mark.parametrize("cast", [True, False])
def test_autocast(cast: bool) -> None:
    """Products in bfloat16 and the loss in float32, as in the plain run; with the cast that transformers
    writes too."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = _LM()
        if on:
            ChunkedCrossEntropy(chunks=6).apply(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(IDS)
            logits = logits.float() if cast else logits
            loss = F.cross_entropy(logits.flatten(0, 1), TARGET.flatten())
        loss.backward()
        assert loss.dtype == torch.float32
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=0.02, atol=0.01 * float(a.detach().abs().max()))


def test_a_bfloat16_model() -> None:
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = _LM().bfloat16()
        if on:
            ChunkedCrossEntropy(chunks=6).apply(model)
        loss = F.cross_entropy(model(IDS).flatten(0, 1).float(), TARGET.flatten())
        loss.backward()
        assert loss.dtype == torch.float32
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02 * float(a.detach().abs().max()))


def test_a_scaled_half_precision_loss_keeps_its_small_gradients() -> None:
    """Gradients are formed unscaled, so the scale of a mean over many tokens does not push them under
    float16."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).half(), (0.2 * torch.randn(CLASSES, 32)).half()
    hidden.requires_grad_(), weight.requires_grad_()
    target = torch.randint(0, CLASSES, (64,))
    terms = LossTerms(compute_dtype=torch.half, chunks=4)
    loss = linear_cross_entropy(hidden, weight, None, target, terms=terms)
    loss.backward(torch.tensor(1024.0))
    wide, wide_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(wide, wide_weight), target).backward(torch.tensor(1024.0))
    for ours, exact in ((hidden.grad, wide.grad), (weight.grad, wide_weight.grad)):
        torch.testing.assert_close(ours.double(), exact, rtol=0.01, atol=0.002 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (GPT, "head"),
        (_LM, "head"),
        (lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)), "2"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9000)), "1"),
        (lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), "2"),
        (lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)), None),
        (CASES["hf-gpt2"].model, "lm_head"),
        (CASES["hf-bert"].model, "cls.predictions.decoder"),
        (CASES["hf-t5"].model, "lm_head"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10)), None),
        (lambda: nn.LSTM(4, 4), None),
    ],
)
def test_the_output_layer_is_found(make: Callable[[], nn.Module], name: str | None) -> None:
    found = find_output_layer(make())
    assert (found and found[0]) == name


def test_refusals_name_the_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    with pytest.raises(UsageError, match="no output layer found in this Sequential.*ChunkedCrossEntropy"):
        ChunkedCrossEntropy().apply(model)
    ChunkedCrossEntropy(layer="1").apply(model)
    assert isinstance(model(torch.randn(2, 8)), DeferredLogits)
    undo(model)
    with pytest.raises(UsageError, match="no module '7'"):
        ChunkedCrossEntropy(layer="7").apply(model)

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(UsageError, match="'0' is a Own with a forward of its own"):
        ChunkedCrossEntropy(layer="0").apply(nn.Sequential(Own(4, 4)))
    with pytest.raises(UsageError, match="chunks must be a whole number of at least 1, not 0"):
        ChunkedCrossEntropy(chunks=0)


@pytest.mark.parametrize("named", ["head", None])
def test_adapters_beside_the_output_layer(named: str | None) -> None:
    """Not on it: chunks as ever. On it: its logits are not its weight's alone, which is said."""
    pytest.importorskip("peft")
    model = LoRA(rank=2).apply(_LM())
    with _Largest() as largest:
        model = ChunkedCrossEntropy(chunks=6, layer=named).apply(model)
        F.cross_entropy(model(IDS).flatten(0, 1), TARGET.flatten()).backward()
    assert largest.rows < IDS.numel()
    undo(model)
    undo(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    LoRA(rank=2, targets=["mid", "head"]).apply(model)
    with pytest.raises(
        UsageError, match=r"'head(\.base_layer)?' has LoRA's adapters.*leave it out of LoRA's"
    ):
        ChunkedCrossEntropy(layer=named).apply(model)
    undo(model)
    ChunkedCrossEntropy(layer=named).apply(model)
    with pytest.raises(UsageError, match="replaced the forward of 'head'; apply lora first"):
        LoRA(rank=2, targets=["mid", "head"]).apply(model)


def test_ligers_kernels_need_cuda_and_say_so() -> None:
    model = _LM()
    with pytest.raises(CannotRunHere, match=r"'liger'.* Triton .*'head' is on 'cpu'.*backend='torch'"):
        ChunkedCrossEntropy(backend="liger").apply(model)
    assert "forward" not in vars(model.head)
    with pytest.raises(UsageError, match="backend must be 'torch' or 'liger', not 'cuda'"):
        ChunkedCrossEntropy(backend="cuda")


@pytest.mark.slow
def test_ligers_kernels_give_what_our_chunks_give_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is switched on before Triton is imported."""
    pytest.importorskip("liger_kernel")
    script = Path(__file__).with_name("liger_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []


@pytest.mark.gpu
def test_ligers_kernels_give_what_our_chunks_give_on_a_real_gpu() -> None:
    from liger_cases import differences

    assert [row for row in differences("cuda") if not row[1] <= 1] == []
