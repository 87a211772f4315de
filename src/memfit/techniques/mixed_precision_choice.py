"""Which precision, and which modules stay in fp32, by measured error on the user's own batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memfit.techniques.mixed_precision_policy import kept_modules

if TYPE_CHECKING:
    from memfit.techniques.mixed_precision import MixedPrecisionTraining

Low = Literal["fp16", "bf16"]
_DTYPES: dict[Low, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(
    mp: MixedPrecisionTraining,
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    tolerance: float,
) -> tuple[Low, tuple[str, ...]]:
    """The precision, and the names of the modules whose error is above ``tolerance`` in it."""
    kept = set(kept_modules(model, mp.keep_fp32))
    candidates: tuple[Low, ...] = ("bf16", "fp16") if mp.precision == "auto" else (mp.precision,)
    errors = module_errors(model, batch, loss, candidates)
    above = {
        low: tuple(name for name, error in errors[low].items() if not error <= tolerance and name not in kept)
        for low in candidates
    }
    best = min(candidates, key=lambda low: (len(above[low]), candidates.index(low)))
    return best, above[best]


def module_errors(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], precisions: tuple[Low, ...]
) -> dict[Low, dict[str, float]]:
    """By precision and module: the largest relative error of its outputs when it runs in that precision on
    the inputs that an fp32 forward pass gives it. ``inf`` where a value overflows.

    Modules without children that have parameters are measured. Model, random state and gradients are left as
    they were.
    """
    errors: dict[Low, dict[str, float]] = {low: {} for low in precisions}

    def measured(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for low in precisions:
                device = next(p.device.type for p in module.parameters())
                with torch.autocast(device, _DTYPES[low]):
                    again = type(module).forward(module, *args, **kwargs)
                errors[low][name] = max(errors[low].get(name, 0.0), _relative_error(again, output))

        return hook

    leaves = {
        name: module
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) and any(True for _ in module.parameters())
    }
    with _as_it_was(model), torch.no_grad():
        hooks = [m.register_forward_hook(measured(name), with_kwargs=True) for name, m in leaves.items()]
        try:
            loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
    return errors


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers and random states are put back afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _relative_error(low: Any, full: Any) -> float:
    worst = 0.0
    for a, b in zip(tree_leaves(low), tree_leaves(full), strict=True):
        if isinstance(b, Tensor) and b.is_floating_point() and b.numel():
            size = float(b.float().norm())
            error = float((a.float() - b.float()).norm())
            worst = max(worst, error / size if size else error)
            if not torch.isfinite(a).all() and torch.isfinite(b).all():
                return float("inf")
    return worst
