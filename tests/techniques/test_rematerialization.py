"""Dropped results come back to the bit, whatever is kept, and only what is needed is computed again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from technique_models import CASES, assert_bitwise, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memfit.capture import capture_step
from memfit.capture.graph import StepGraph
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.techniques import Rematerialization, undo
from memfit.techniques.blocks import block_names
from memfit.techniques.recomputed_steps import RecomputedStep


def _workload(case: str, technique: Rematerialization | None = None) -> Workload:
    def model() -> nn.Module:
        made = CASES[case].model()
        return made if technique is None else technique.apply(made)

    return Workload(name=case, model=model, batch=CASES[case].batch, loss=CASES[case].loss)


def _captured(case: str, technique: Rematerialization | None = None) -> StepGraph:
    return capture_step(_workload(case, technique), device="cpu")


@pytest.fixture(scope="module")
def steps() -> dict[str, RecomputedStep]:
    found = {}
    for case in ("gpt", "cnn"):
        blocks = (*block_names(CASES[case].model()), "")
        found[case] = RecomputedStep(_captured(case), blocks)
    return found


def _some_kept(step: RecomputedStep, seed: int) -> dict[str, tuple[str, ...]]:
    """Names of a random half of what may be kept."""
    drawn = random.Random(seed)
    makers = sorted({step.writers[s][0] for s in (*step.candidates, *step.extras)})
    return step.keeps([op for op in makers if drawn.random() < 0.5])


@pytest.mark.parametrize("case", ["gpt", "cnn"])
@pytest.mark.parametrize("seed", range(3))
def test_any_choice_is_bitwise(case: str, seed: int, steps: dict[str, RecomputedStep]) -> None:
    technique = Rematerialization(blocks=_some_kept(steps[case], seed))
    assert_bitwise(train(CASES[case]), train(CASES[case], technique.apply))


@pytest.mark.parametrize("case", ["gpt", "cnn"])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_is_played_is_the_step_that_runs(
    case: str, seed: int, steps: dict[str, RecomputedStep]
) -> None:
    """FLOPs run again, and the peak, as the tracker finds them in a real step."""
    step, keeps = steps[case], _some_kept(steps[case], seed)
    played = step.play(step.kept_by(keeps))
    real = _captured(case, Rematerialization(blocks=keeps))
    assert sum(step.graph.ops[op].flops for op in played.run_again) == real.recompute_flops
    assert played.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu_(norm(convolution(x)))
        return x


def test_kept_convolutions_do_not_run_again_and_python_runs_once() -> None:
    model = Rematerialization(blocks={"": ["convolution"]}).apply(Normed())
    loss = model(torch.randn(2, 4, 6, 6)).square().mean()
    with Calls() as calls:
        loss.backward()
    assert calls.counts["aten::convolution"] == 0
    assert calls.counts["aten::native_batch_norm"] == 3
    assert model.runs == 1
    assert int(model.norms[0].num_batches_tracked) == 1


def _gradients(forward: Any, module: nn.Module, technique: Rematerialization | None) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(4, 8, requires_grad=True)
    if technique is not None:
        technique.apply(module)
    loss = forward(module, x)
    loss.backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    if technique is not None:
        undo(module)
    module.zero_grad()
    return [gradient.clone() for gradient in found if gradient is not None]


class Doubled(torch.autograd.Function):
    """Doubles in place where no operator is seen, as kernels do that are launched on a pointer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= 2
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class HiddenWrites(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(Doubled.apply(super().forward(x)) * 3).square()


class WrittenAfterUse(nn.Linear):
    """The product is read by one operator and then written in place by another."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        other = torch.exp(product + 1)
        return product.add_(5).tanh() * other.square()


class Branching(nn.Linear):
    """Takes another way at every call: what runs Python again fails on it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).sigmoid().square() if self.calls % 2 else super().forward(x).tanh()


class Views(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward(x).chunk(2, -1)
        rows = torch.empty(4, 8)
        rows[:, :4], rows[:, 4:] = first.sigmoid(), second.t().contiguous().t().exp()
        return rows.tanh().square() * torch.dropout(rows, 0.5, True)


class OwnCheckpoint(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        inner = lambda y: torch.dropout(torch.tanh(super(OwnCheckpoint, self).forward(y)), 0.5, True)  # noqa: E731
        return checkpoint(inner, torch.sigmoid(super().forward(x)), use_reentrant=False).exp()


class Recurrent(nn.Linear):
    """Writes into slices of what was stacked."""

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for _ in range(3):
            x = torch.tanh(super().forward(x))
            states.append(x)
        stacked = torch.stack(states)
        stacked[0] += 1
        stacked[1:].mul_(2)
        return stacked.sigmoid()


class Repeated(nn.Linear):
    """What is kept is read as if it were larger than it is."""

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)[:1].expand(1000, 8)
        return (rows * 2).sigmoid().square().sum(0)


class Experts(nn.Linear):
    """Rows go where the data says."""

    def forward(self, x: Tensor) -> Tensor:
        weights = super().forward(x).softmax(-1)
        out = torch.zeros_like(x)
        for expert in range(8):
            rows = (weights.argmax(-1) == expert).nonzero().squeeze(-1)
            out.index_add_(0, rows, nn.functional.silu(x[rows]) * weights[rows, expert : expert + 1])
        return out


@pytest.mark.parametrize("keeps", [(), ("linear",), ("exp", "tanh")], ids=str)
@pytest.mark.parametrize(
    "kind", [HiddenWrites, WrittenAfterUse, Branching, Views, OwnCheckpoint, Recurrent, Repeated, Experts]
)
def test_what_modules_do_in_their_forward(kind: type[nn.Linear], keeps: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module = kind(8, 8)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        model.calls = 0  # type: ignore[assignment]
        torch.manual_seed(1)
        return model(x).sum()

    plain = _gradients(forward, module, None)
    changed = _gradients(forward, module, Rematerialization(blocks={"": keeps}))
    assert all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_a_graph_that_is_kept_can_be_used_twice() -> None:
    model = Rematerialization(blocks={"": []}).apply(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    )
    loss = model(torch.randn(3, 4)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_parameter_that_changed_in_between_is_told() -> None:
    model = Rematerialization(blocks={"": []}).apply(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    )
    loss = model(torch.randn(3, 4)).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"0": "linear:0"}, "list of names"),
        ({}, "must map"),
        ({"nothing": []}, "nothing"),
        ({"0": ["a b"]}, "names"),
    ],
)
def test_bad_settings_are_told(blocks: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Rematerialization(blocks=blocks).apply(nn.Sequential(nn.Linear(2, 2)))


def test_derivatives_of_derivatives_and_function_transforms() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4)

    def penalty() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(plain(inputs).sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [plain[0].weight, plain[2].weight]))

    def transformed() -> list[Tensor]:
        def value(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(plain, parameters, (x,)).sum()

        return list(torch.func.grad(value)(dict(plain.named_parameters())).values())

    before = [*penalty(), *transformed()]
    Rematerialization(blocks={"": []}).apply(plain)
    assert all(torch.equal(a, b) for a, b in zip(before, [*penalty(), *transformed()], strict=True))
