"""Mixed precision against PyTorch's own autocast and GradScaler, and what a wrong order says."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from technique_models import CASES, AdapterBlock
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import MixedPrecisionTraining, undo

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def _started(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> tuple[MixedPrecisionTraining, nn.Module, torch.optim.Optimizer]:
    net, mp = _net(), MixedPrecisionTraining(**{"precision": "fp16"} | settings)
    return mp, *mp.apply(net, optimizer(net.parameters(), lr=1e-2))


def _loss(mp: MixedPrecisionTraining, net: nn.Module, rows: slice = slice(None)) -> Tensor:
    with mp.autocast():
        return F.cross_entropy(net(X[rows]), Y[rows])


def _poison(net: nn.Module) -> None:
    """An overflow, as a gradient that is too large gives it."""
    next(net.parameters()).grad.view(-1)[3] = float("inf")


def test_the_promised_form_steps_as_pytorchs_own_parts_do() -> None:
    """The same gradients, skips and scales as GradScaler with unscale, clip, step and update by hand."""
    mp, net, optimizer = _started(growth_interval=3, max_grad_norm=0.5, keep_fp32=())
    theirs = _net()
    for module in theirs:
        if isinstance(module, nn.LayerNorm):
            module.forward = _in_fp32(module)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    for number in range(9):
        factor = float("inf") if number in (1, 2) else 1.0
        (mp.scale_loss(_loss(mp, net)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(theirs(X).float(), Y)
        (scaler.scale(loss) * factor).backward()
        scaler.unscale_(their_optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scaler.step(their_optimizer)
        scaler.update()
        their_optimizer.zero_grad()
        assert mp.scale == scaler.get_scale()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), theirs.parameters(), strict=True))
    assert mp.skipped_steps == 2
    assert mp.scale_history == ((0, 65536.0), (2, 32768.0), (3, 16384.0), (6, 32768.0), (9, 65536.0))


def _in_fp32(module: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: F.layer_norm(x.float(), module.normalized_shape, module.weight, module.bias)


def _twice(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mp.scale_loss(_loss(mp, net)).backward()
    optimizer.step()
    optimizer.step()


def _unscaled(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _loss(mp, net).backward()
    optimizer.step()


def _both(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mp.scale_loss(_loss(mp, net)).backward()
    _loss(mp, net).backward()
    optimizer.step()


def _clipped(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mp.scale_loss(_loss(mp, net)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


def _clipped_by_value(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mp.scale_loss(_loss(mp, net)).backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.1)
    optimizer.step()


def _grad_scaler(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(_loss(mp, net)).backward()
    scaler.step(optimizer)


def _accumulated_late(mp: MixedPrecisionTraining, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mp.scale_loss(_loss(mp, net)).backward()
    mp.clip_grad_norm_(net.parameters(), 1.0)
    mp.scale_loss(_loss(mp, net)).backward()


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (_twice, "step once"),
        (_unscaled, r"scale_loss\(loss\).backward\(\)"),
        (_both, "changed while they were scaled by 65536"),
        (_clipped, r"mp.clip_grad_norm_\(parameters, max_norm\)"),
        (_clipped_by_value, "clip_grad_value_"),
        (_grad_scaler, "drop the GradScaler"),
        (_accumulated_late, "unscale once, after the last micro-batch"),
    ],
)
def test_a_wrong_order_is_an_error_that_says_so(mistake: Callable[..., None], says: str) -> None:
    mp, net, optimizer = _started()
    before = [p.detach().clone() for p in net.parameters()]
    if mistake is not _twice:
        with pytest.raises(UsageError, match=says):
            mistake(mp, net, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    else:
        with pytest.raises(UsageError, match=says):
            mistake(mp, net, optimizer)
    optimizer.zero_grad()
    mp.forget_gradients()
    mp.scale_loss(_loss(mp, net)).backward()
    optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clip", ["setting", "call", "none"])
def test_accumulated_gradients_are_those_of_the_whole(clip: str, to_none: bool) -> None:
    weights = []
    for pieces in ([slice(None)], [slice(0, 3), slice(3, 8)]):
        mp, net, optimizer = _started(torch.optim.SGD, max_grad_norm=0.1 if clip == "setting" else None)
        for _ in range(3):
            for piece in pieces:
                share = len(X[piece]) / len(X)
                mp.scale_loss(_loss(mp, net, piece) * share).backward()
            if clip == "call":
                assert mp.clip_grad_norm_(net.parameters(), 0.1) < 10  # of unscaled gradients
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        weights.append([p.detach().clone() for p in net.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_a_closure_runs_once_and_its_step_is_the_same() -> None:
    results = []
    for by_closure in (False, True):
        mp, net, optimizer = _started()
        calls: list[float] = []

        def closure(mp: Any = mp, net: Any = net, optimizer: Any = optimizer, calls: Any = calls) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(mp, net)
            mp.scale_loss(loss).backward()
            calls.append(float(loss.detach()))
            return loss

        for _ in range(3):
            if by_closure:
                assert float(optimizer.step(closure).detach()) == calls[-1]
            else:
                closure()
                optimizer.step()
        assert len(calls) == 3
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    mp, net, optimizer = _started(torch.optim.LBFGS)
    with pytest.raises(UsageError, match="LBFGS"):
        optimizer.step(lambda: mp.scale_loss(_loss(mp, net)))


def test_several_optimizers_share_one_scale_that_waits_for_all_of_them() -> None:
    net = _net()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.SGD([*net[1].parameters(), *net[3].parameters()], lr=0.1)
    mp = MixedPrecisionTraining(precision="fp16")
    model, optimizers = mp.apply(net, [first, second])
    assert model is net and optimizers == [first, second]
    mp.scale_loss(_loss(mp, net)).backward()
    kept = net[3].weight.grad
    first.step()
    assert mp.scale_history == ((0, 65536.0),) and kept.abs().max() > 100, "the second's are scaled still"
    _poison(net[3])
    with pytest.raises(UsageError, match="changed while they were scaled"):
        second.step()
    net.zero_grad()
    mp.forget_gradients()
    before = net[3].weight.detach().clone()
    (mp.scale_loss(_loss(mp, net)) * float("inf")).backward()
    first.step()
    assert mp.skipped_steps == 0
    second.step()
    assert mp.skipped_steps == 1 and torch.equal(net[3].weight, before)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_do_not_warn_when_the_first_step_is_skipped(scheduler_first: bool) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    mp = MixedPrecisionTraining(precision="fp16")
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        mp.apply(net, optimizer)
    else:
        mp.apply(net, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (float("inf"), 1.0):
            (mp.scale_loss(_loss(mp, net)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert mp.skipped_steps == 1 and optimizer.param_groups[0]["lr"] == 0.25
    undo(net)
    _loss_plain(net).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def _loss_plain(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def test_the_scale_goes_on_from_a_checkpoint_of_ours_or_of_a_grad_scaler() -> None:
    mp, net, optimizer = _started(growth_interval=2)
    for factor in (float("inf"), 1.0):
        (mp.scale_loss(_loss(mp, net)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    again, net, optimizer = _started(growth_interval=2)
    again.load_state_dict(mp.state_dict())
    assert (again.scale, again.skipped_steps) == (32768.0, 1)
    again.scale_loss(_loss(again, net)).backward()
    optimizer.step()
    assert again.scale == 65536.0, "the second good step in a row"
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.zeros(1))
    again.load_state_dict(scaler.state_dict())
    assert again.scale == 128.0
    with pytest.raises(UsageError, match="positive 'scale'"):
        again.load_state_dict({"scale": 0})


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.mid = nn.Linear(16, 4), nn.Linear(16, 16)
        self.norm, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.mid(x))) * self.router(x).softmax(-1)


@pytest.mark.parametrize(
    ("patterns", "full"),
    [
        ((), {"router", "norm"}),
        (("lm_head",), {"router", "norm", "lm_head"}),
        (("mi*.bias",), {"router", "norm", "mid"}),
    ],
)
def test_what_stays_in_fp32(patterns: tuple[str, ...], full: set[str]) -> None:
    """Routers, norms and the softmax always; more by the name of a module or of a tensor."""
    model, seen = _Experts(), {}
    MixedPrecisionTraining(precision="bf16", keep_fp32=patterns).apply(model)
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: out.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    assert {name for name, dtype in seen.items() if dtype == torch.float32} == full
    assert model(X).dtype == torch.float32
    undo(model)
    model(X)
    assert set(seen.values()) == {torch.float32}


def test_a_pattern_that_names_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(UsageError, match=r"'lm_haed' names no module.*near it are lm_head"):
        MixedPrecisionTraining(keep_fp32=["lm_haed"], precision="bf16").apply(_Experts())


def test_modules_that_overflow_or_err_on_the_batch_stay_in_fp32() -> None:
    model = _Experts()
    with torch.no_grad():
        model.mid.weight.fill_(4e4)  # sums beyond 65504, the largest fp16
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    batch = X.abs()
    chosen = MixedPrecisionTraining(precision="fp16").choose(model, batch, lambda m, b: m(b).square().mean())
    assert chosen.keep_fp32 == ("mid",)
    auto = MixedPrecisionTraining().choose(model, batch, lambda m, b: m(b).square().mean())
    assert (auto.precision, auto.keep_fp32) == ("bf16", ()), "bf16 holds such values"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    chosen.apply(model, optimizer)
    assert model(batch).isfinite().all()


def test_sparse_gradients_are_unscaled_and_not_clipped() -> None:
    table = nn.EmbeddingBag(1000, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    mp = MixedPrecisionTraining(precision="fp16")
    mp.apply(table, optimizer)
    ids = torch.tensor([[1, 2, 2, 7]])
    mp.scale_loss(table(ids).sum()).backward()
    with pytest.raises(UsageError, match=r"that of weight, of shape \(1000, 8\), is sparse"):
        mp.clip_grad_norm_(table.parameters(), 1.0)
    optimizer.step()
    assert mp.skipped_steps == 0
    assert float(table.weight.grad.coalesce().values().max()) == 0.5, "two of four, averaged and unscaled"


def test_results_in_a_dataclass_of_the_users_leave_in_fp32() -> None:
    @dataclasses.dataclass(frozen=True)
    class Result:
        logits: Tensor
        more: list[Tensor]

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Result:
            y = super().forward(x)
            return Result(y, [y])

    net = Net(4, 4)
    MixedPrecisionTraining(precision="bf16").apply(net)
    result = net(torch.ones(2, 4))
    assert type(result) is Result and {result.logits.dtype, result.more[0].dtype} == {torch.float32}


def test_complex_gradients_are_unscaled() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    net = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    mp = MixedPrecisionTraining(precision="fp16")
    mp.apply(net, optimizer)
    for factor, skipped in ((2.0, 0), (float("inf"), 1)):
        mp.scale_loss((weight * torch.tensor([1.0, 2.0j, 3.0])).abs().square().sum() * factor).backward()
        optimizer.step()
        assert mp.skipped_steps == skipped
        if not skipped:
            assert torch.equal(weight.grad, torch.tensor([4.0, 16.0, 36.0], dtype=torch.cfloat))
        optimizer.zero_grad()


def test_an_evaluation_can_be_in_fp32_and_undo_ends_it_all() -> None:
    mp, net, optimizer = _started(precision="bf16")
    plain = _net()(X)
    assert not torch.equal(net(X), plain)
    with mp.autocast(enabled=False):
        assert torch.equal(net(X), plain)
    assert mp.scale == 1.0 and mp.scale_loss(plain) is plain
    undo(net)
    assert torch.equal(net(X), plain) and "step" not in vars(optimizer)
    with pytest.raises(UsageError, match="apply it first"):
        mp.scale_loss(plain)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"precision": "fp8"}, "fp16, bf16, auto"),
        ({"keep_fp32": "norm"}, "list of names"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"precision": "fp16", "weights": "bf16"}, "needs precision='bf16'"),
        ({"rounding": "up"}, "split, kahan, stochastic, nearest"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MixedPrecisionTraining(**settings)


def test_what_it_cannot_work_on_is_refused_before_anything_changes() -> None:
    with pytest.raises(UsageError, match="needs the optimizer"):
        MixedPrecisionTraining(precision="fp16").apply(_net())
    half = _net().half()
    with pytest.raises(UsageError, match="weights in fp16"):
        MixedPrecisionTraining(precision="bf16").apply(half)
    assert not any("forward" in vars(module) for module in half.modules())


def test_frozen_layers_with_adapters_train() -> None:
    model = CASES["frozen"].model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    mp = MixedPrecisionTraining(precision="fp16")
    mp.apply(model, optimizer)
    mp.scale_loss(CASES["frozen"].loss(model, CASES["frozen"].batch())).backward()
    optimizer.step()
    trained = [m for m in model.modules() if isinstance(m, AdapterBlock)]
    assert all(m.a.grad is not None and m.b.grad is not None for m in trained)


@pytest.mark.parametrize(
    "module",
    [
        "adaptive",
        "batch_size",
        "low_memory_optimizers",
        "micro_batching",
        "mixed_precision",
        "offloaded_optimizer_state",
        "optimizer_in_backward",
    ],
)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"memfit.techniques.{module}"))
    assert result.attempted and not result.failed
