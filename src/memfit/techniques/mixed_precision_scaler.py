"""Dynamic loss scaling: the scale, its growth and its falls. The same rules as `torch.amp.GradScaler`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.core.errors import UsageError

GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5


@dataclass(kw_only=True)
class LossScale:
    """The scale of a run. Powers of two: scaling and unscaling are exact unless something overflows.

    Attributes:
        scale: what losses are multiplied with now.
        growth_interval: after how many steps in a row without an overflow the scale doubles.
        good_steps: how many there are in a row now.
        skipped_steps: how many updates had an overflow, so that nothing was stepped.
        history: ``(update, scale)`` at the start and whenever the scale changed.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0
    updates: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.history:
            self.history.append((0, self.scale))

    def update(self, overflowed: bool) -> None:
        """Notes one update: halves the scale after an overflow, doubles it after enough without."""
        self.updates += 1
        before = self.scale
        if overflowed:
            self.skipped_steps += 1
            self.good_steps = 0
            self.scale *= BACKOFF_FACTOR
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps = 0
                self.scale *= GROWTH_FACTOR if self.scale * GROWTH_FACTOR < 2.0**127 else 1.0
        if self.scale != before:
            self.history.append((self.updates, self.scale))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; the keys are GradScaler's and two more."""
        return {
            "scale": self.scale,
            "growth_factor": GROWTH_FACTOR,
            "backoff_factor": BACKOFF_FACTOR,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.good_steps,
            "skipped_steps": self.skipped_steps,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reads `state_dict`'s result, or that of a GradScaler.

        Raises:
            UsageError: no scale in it, or one that is no positive number.
        """
        scale = state.get("scale")
        if not isinstance(scale, (int, float)) or not (math.isfinite(scale) and scale > 0):
            raise UsageError(f"a loss scale's state needs a positive 'scale', not {scale!r}")
        self.scale = float(scale)
        self.growth_interval = int(state.get("growth_interval", self.growth_interval))
        self.good_steps = int(state.get("_growth_tracker", 0))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.updates = int(state.get("updates", 0))
        self.history = [(self.updates, self.scale)]


@torch.no_grad()
def unscale(parameters: Iterable[torch.Tensor], scale: float) -> bool:
    """Divides the gradients by ``scale`` in place; whether any value is infinite or not a number.

    One kernel for each device and type, and one read of each device. Sparse gradients are coalesced first:
    repeated rows may overflow only in their sum. Sharded gradients agree over their ranks.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    sharded = False
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        sharded = sharded or hasattr(parameter.grad, "to_local")
        values = _values(parameter.grad)
        groups.setdefault((values.device, values.dtype), []).append(values)
    found: dict[torch.device, torch.Tensor] = {}
    for (device, _), tensors in groups.items():
        flag = found.setdefault(device, torch.zeros(1, device=device))
        inverse = torch.full((1,), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, inverse)
    if sharded:
        for flag in found.values():
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return any(bool(flag.item()) for flag in found.values())


@torch.no_grad()
def all_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether every gradient is finite."""
    gradients = (_values(p.grad) for p in parameters if p.grad is not None)
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, in its memory: of sparse ones those that are there, of complex pairs."""
    if gradient.is_sparse:
        gradient = gradient._values()
    local = getattr(gradient, "to_local", None)
    values: torch.Tensor = local() if callable(local) else gradient
    return torch.view_as_real(values) if values.is_complex() else values
