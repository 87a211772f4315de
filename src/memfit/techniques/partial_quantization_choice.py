"""Which layers can be quantized: measured on the user's batches, one at a time and then together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What quantizing one layer does.

    Attributes:
        layer: its name.
        loss_change: by how much the mean loss rises with this layer alone quantized.
        weight_error: of the rounded weight, in parts of the weight's norm.
        chosen: whether it is among the safe ones.
    """

    layer: str
    loss_change: float
    weight_error: float
    chosen: bool = False


def choose(
    kind: str,
    root: nn.Module,
    layers: Mapping[str, Any],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    tolerance: float,
) -> tuple[tuple[str, ...], tuple[Sensitivity, ...]]:
    """Names of the layers that together keep the loss within ``tolerance`` of itself, least sensitive first,
    and all rows. Leaves the model as it was."""
    if not batches:
        raise UsageError("partial_quantization: give at least one batch to measure on")
    rounded = {name: fake_quantized(layer.weight.detach(), kind) for name, layer in layers.items()}
    plain = _loss(root, batches, loss)
    rows = []
    for name, layer in layers.items():
        with _weights({name: rounded[name]}, layers):
            change = _loss(root, batches, loss) - plain
        size = float(layer.weight.detach().norm()) or 1.0
        error = float((rounded[name] - layer.weight.detach()).norm()) / size
        rows.append(Sensitivity(layer=name, loss_change=change, weight_error=error))
    rows.sort(key=lambda row: (row.loss_change, row.layer))
    count = _most(rows, rounded, layers, lambda: _loss(root, batches, loss), plain + tolerance * abs(plain))
    if count == 0:
        raise UsageError(
            f"partial_quantization: no layer is safe: the least sensitive one, {rows[0].layer}, already "
            f"moves the loss from {plain:.4g} by {rows[0].loss_change:.2g}; raise tolerance "
            f"(now {tolerance:g})"
        )
    marked = tuple(
        Sensitivity(
            layer=row.layer, loss_change=row.loss_change, weight_error=row.weight_error, chosen=place < count
        )
        for place, row in enumerate(rows)
    )
    return tuple(row.layer for row in rows[:count]), marked


def fake_quantized(weight: Tensor, kind: str) -> Tensor:
    """The weight after the round trip: what the quantized layer will multiply with."""
    if kind == "int8":
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return (weight / scale).round().clamp(-128, 127) * scale
    return nf4_round_trip(weight)


NF4_LEVELS = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The sixteen values of NF4: quantiles of a normal distribution, scaled to one (Dettmers et al., 2023)."""


def nf4_round_trip(weight: Tensor, block: int = 64) -> Tensor:
    """Each ``block`` of numbers by its largest, to the nearest of `NF4_LEVELS`."""
    flat = weight.flatten().float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scale = padded.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    rounded = levels[torch.bucketize(padded / scale, middles)] * scale
    return rounded.flatten()[: flat.numel()].view(weight.shape).to(weight.dtype)


def _most(
    rows: Sequence[Sensitivity],
    rounded: Mapping[str, Tensor],
    layers: Mapping[str, Any],
    loss: Callable[[], float],
    limit: float,
) -> int:
    """The largest number of layers, least sensitive first, that is within the limit; by bisection, as the
    loss rises with them but for noise."""

    def fits(count: int) -> bool:
        with _weights({row.layer: rounded[row.layer] for row in rows[:count]}, layers):
            return loss() <= limit

    low, high = 0, len(rows)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@contextlib.contextmanager
def _weights(changed: Mapping[str, Tensor], layers: Mapping[str, Any]) -> Iterator[None]:
    """The layers with other weights, until the block ends."""
    before = {name: layers[name].weight.data for name in changed}
    try:
        for name, weight in changed.items():
            layers[name].weight.data = weight
        yield
    finally:
        for name, weight in before.items():
            layers[name].weight.data = weight


def _loss(root: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> float:
    was = root.training
    root.eval()
    try:
        with torch.no_grad():
            return sum(float(loss(root, batch)) for batch in batches) / len(batches)
    finally:
        root.train(was)
