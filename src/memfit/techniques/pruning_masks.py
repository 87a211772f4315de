"""Keeps chosen weights at zero while training goes on, and brings back what was there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.techniques.base import Undo


def hold_zeros(
    weights: Sequence[Any],
    mask_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> Undo:
    """Sets weights to zero where ``mask_of`` is False; gradients are zero there, and after each step of the
    optimizer (whose moments may still move them) they are zero again.

    A mask stays where its weight was then; where weight or gradient are elsewhere now (offloaded, moved), it
    is taken there each time.
    """
    held = [(weakref.ref(weight), mask_of(weight)) for weight in weights]
    removed = [weight.detach()[~mask].to("cpu") for weight, (_, mask) in zip(weights, held, strict=True)]
    handles: list[Any] = []
    for weight, (_, mask) in zip(weights, held, strict=True):
        weight.data.mul_(mask)
        if weight.requires_grad:
            handles.append(weight.register_hook(_masked(mask)))
    if optimizer is not None:
        handles.append(optimizer.register_step_post_hook(lambda *_: _zero(held)))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for (reference, mask), values in zip(held, removed, strict=True):
            weight = reference()
            if weight is not None:
                weight.data[~mask.to(weight.device)] = values.to(weight.device, weight.dtype)

    return undo


def _masked(mask: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * mask.to(gradient.device)


def _zero(held: Sequence[tuple[weakref.ref[Any], Tensor]]) -> None:
    with torch.no_grad():
        for reference, mask in held:
            weight = reference()
            if weight is not None:
                weight.mul_(mask.to(weight.device))
