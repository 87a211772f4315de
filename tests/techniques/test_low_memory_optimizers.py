"""Small optimizer states: their bytes, their moments there and back, and when they do not help."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.capture import capture_step
from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.workload import Workload
from memfit.techniques import (
    LowMemoryOptimizer,
    OffloadedOptimizerState,
    OptimizerInBackward,
    offloaded_optimizer_state,
    undo,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
"""torchao and bitsandbytes warn about kernels that they do not find without a GPU."""

MOMENTS = ("exp_avg", "exp_avg_sq")
QUANTIZED = [
    ("adamw8bit", "bitsandbytes"),
    ("paged", "auto"),
    ("adamw8bit", "torchao"),
    ("adamw4bit", "auto"),
]


def _net() -> nn.Sequential:
    """Large matrices, one whose size is no multiple of a block, and small vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 65), nn.LayerNorm(65))


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, scheduler: Any = None) -> Tensor:
    for number in numbers:
        torch.manual_seed(number)
        loss = net(torch.randn(16, 64)).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return loss.detach()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Each storage once, those inside of quantized tensors too."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        elif isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for value in state.values():
            add(value)
    return sum(found.values())


@pytest.mark.parametrize(("kind", "backend"), [*QUANTIZED, ("lion8bit", "auto"), ("adafactor", "auto")])
def test_the_state_has_the_bytes_that_are_said(kind: Any, backend: Any) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    groups = [group["params"] for group in optimizer.param_groups]
    technique = LowMemoryOptimizer(kind=kind, backend=backend)
    assert technique.apply(net, optimizer) == (net, optimizer)
    _steps(net, optimizer, range(3), scheduler)
    assert _state_bytes(optimizer) == technique.state_bytes(net)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1.25e-4), "the scheduler's steps count"
    undo(net)
    assert type(optimizer) is torch.optim.AdamW
    assert all(
        now is then for now, then in zip((g["params"] for g in optimizer.param_groups), groups, strict=True)
    )
    _steps(net, optimizer, range(3, 4), scheduler)


@pytest.mark.parametrize(("kind", "backend"), QUANTIZED)
def test_moments_are_quantized_in_the_middle_and_come_back(kind: Any, backend: Any) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    _steps(net, optimizer, range(3))
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    LowMemoryOptimizer(kind=kind, backend=backend).apply(net, optimizer)
    undo(net)
    assert all(torch.equal(optimizer.state[p][k], v) for p, s in before.items() for k, v in s.items())
    LowMemoryOptimizer(kind=kind, backend=backend).apply(net, optimizer)
    _steps(net, optimizer, range(3, 4))
    undo(net)
    reference = _net()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    _steps(reference, plain, range(4))
    bounds = {"exp_avg": 0.2, "exp_avg_sq": 2.0} if kind == "adamw4bit" else dict.fromkeys(MOMENTS, 0.02)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert optimizer.state[p]["step"] == 4
        for name in MOMENTS:
            error = (optimizer.state[p][name] - plain.state[q][name]).norm() / plain.state[q][name].norm()
            assert float(error) < bounds[name], name


def test_the_default_trains_as_adamw_does() -> None:
    losses = []
    for technique in (None, LowMemoryOptimizer()):
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        if technique is not None:
            technique.apply(net, optimizer)
        losses.append(float(_steps(net, optimizer, range(40))))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_it_says_when_8_bits_do_not_help() -> None:
    """Activations dominate, and most tensors are too small: a negative result, with its numbers."""
    model = lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))  # noqa: E731
    workload = Workload(
        name="convolutions",
        model=model,
        batch=lambda: torch.randn(8, 3, 32, 32),
        loss=lambda m, batch: m(batch).square().mean(),
    )
    saving = LowMemoryOptimizer().estimate(capture_step(workload), model())
    assert "adamw8bit does not help here. 4 of 4 tensors have fewer than 4096 elements" in saving.note
    assert "the most at the peak is" in saving.note
    big = lambda: nn.Linear(512, 512)  # noqa: E731
    workload = Workload(
        name="big", model=big, batch=lambda: torch.randn(2, 512), loss=lambda m, batch: m(batch).mean()
    )
    graph = capture_step(workload)
    saving = LowMemoryOptimizer(backend="bitsandbytes").estimate(graph, big())
    rest = 2 * 512 * 512 * (1 + 4 / 256) + 2 * 512 * 4 + 2048
    assert saving.resting_bytes == 2 * 4 * (512 * 512 + 512) + 8 - rest
    assert "not help" not in saving.note


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    with pytest.raises(UsageError, match="replaces Adam or AdamW, not SGD"):
        LowMemoryOptimizer().apply(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="no amsgrad"):
        LowMemoryOptimizer().apply(net, torch.optim.AdamW(net.parameters(), amsgrad=True))
    table = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    with pytest.raises(UsageError, match=r"0.weight has sparse gradients.*SparseAdam"):
        LowMemoryOptimizer(kind="adafactor").apply(table, torch.optim.AdamW(table.parameters()))
    with pytest.raises(UsageError, match="adamw4bit comes from torchao, not bitsandbytes"):
        LowMemoryOptimizer(kind="adamw4bit", backend="bitsandbytes")
    optimizer = torch.optim.AdamW(net.parameters())
    _steps(net, optimizer, range(1))
    with pytest.raises(UsageError, match="before the first step"):
        LowMemoryOptimizer(kind="adafactor").apply(net, optimizer)
    waves = nn.ParameterDict({"waves": nn.Parameter(torch.ones(3, dtype=torch.cfloat))})
    for kind in ("adafactor", "adamw8bit"):
        with pytest.raises(UsageError, match="waves is complex"):
            LowMemoryOptimizer(kind=kind).apply(waves, torch.optim.AdamW(waves.parameters()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotRunHere, match=r"pip install 'memfit\[quant\]'"):
        LowMemoryOptimizer().apply(net, optimizer)
    assert type(optimizer) is torch.optim.AdamW


# -- steps elsewhere: in the backward pass, on the host ------------------------------------------------------


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's parameters are stepped by copies, as those of a device are."""
    monkeypatch.setattr(offloaded_optimizer_state, "is_elsewhere", lambda parameter: True)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("technique", [OptimizerInBackward(), OffloadedOptimizerState()])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_steps_elsewhere_are_the_same_to_the_bit(technique: Any, kind: Any) -> None:
    results = []
    for applied in (False, True):
        net = _net()
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(net.parameters(), lr=1e-2, **extra)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        _steps(net, optimizer, range(2), scheduler)
        if applied:
            technique.apply(net, optimizer)
        _steps(net, optimizer, range(2, 5), scheduler)
        if applied:
            undo(net)
        _steps(net, optimizer, range(5, 6), scheduler)
        results.append(
            [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v is not None)]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_gradient_is_gone_when_its_parameter_is_stepped() -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    OptimizerInBackward().apply(net, optimizer)
    alive: list[int] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in net.parameters()))
        )
    before = net[0].weight.detach().clone()
    net(torch.randn(4, 64)).sum().backward()
    assert alive == [0] * 6 and not torch.equal(before, net[0].weight)
    with pytest.raises(UsageError, match="gradients cannot be accumulated"):
        net(torch.randn(4, 64)).sum().backward()


def test_the_estimate_of_steps_in_the_backward_pass_is_the_captured_peak() -> None:
    """Held against a capture of the step that really runs so."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])

    def workload(build: Any) -> Workload:
        return Workload(
            name="deep",
            model=model,
            batch=lambda: torch.randn(2, 256),
            loss=lambda m, b: m(b).mean(),
            optimizer=build,
        )

    plain = capture_step(workload(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    saving = OptimizerInBackward().estimate(plain)
    gradients = 4 * 6 * (256 * 256 + 256)
    assert 0.75 * gradients < saving.peak_bytes < gradients
    state = OffloadedOptimizerState().estimate(capture_step(workload(torch.optim.AdamW)))
    assert state.resting_bytes == 2 * gradients + 12 * 4
    assert "each step moves 3.01 MiB" in state.note


@pytest.mark.usefixtures("_as_on_a_device")
def test_offloaded_state_goes_on_from_a_checkpoint() -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    OffloadedOptimizerState().apply(net, optimizer)
    _steps(net, optimizer, range(3))
    again = _net()
    again.load_state_dict(net.state_dict())
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    OffloadedOptimizerState().apply(again, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for model in (net, again):
            model[0].weight.mul_(0.5)  # the host's copy must not win
    assert torch.equal(_steps(net, optimizer, range(3, 5)), _steps(again, other, range(3, 5)))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("technique", [OptimizerInBackward(), OffloadedOptimizerState()])
def test_sparse_gradients_are_stepped_elsewhere_too(technique: Any) -> None:
    weights = []
    for applied in (False, True):
        torch.manual_seed(0)
        table = nn.EmbeddingBag(100, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        if applied:
            technique.apply(table, optimizer)
        for ids in ([[1, 2, 2, 7]], [[7, 9], [1, 1]]):
            table(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(table.weight.detach())
    assert torch.equal(*weights)
