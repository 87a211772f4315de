"""Layers that Liger-Kernel's benchmark measures with gradients that were made before, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from liger_bench import Bench, Row
from reading import DEVICE
from torch import Tensor, nn
from torch.nn import functional


class DynamicTanh(nn.Module):
    """A norm's stand-in: a scaled tanh, in single precision whatever its input has."""

    def __init__(self, width: int, shifted: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * 0.5)
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width)) if shifted else None

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.gamma * torch.tanh(x * self.alpha)
        return scaled if self.beta is None else scaled + self.beta


def dynamic_tanh(row: Row) -> Bench:
    """The layer, its compiled copy and Liger's are there; it had a shift always before 2025-05-19."""
    layers = [DynamicTanh(row["hidden_size"], row.config.get("beta", True)).to(DEVICE) for _ in range(3)]
    x = torch.randn(row["BT"], row["hidden_size"], dtype=row.dtype, device=DEVICE)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return Bench(lambda: layers[0](x), gradients=(gradient,), kept=(layers,))


class MultiTokenAttention(nn.Module):
    """A convolution over probabilities of attention, which sees no later token."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        channels, size = row["C_out"], row["K"]
        shape = (channels, row["C_in"] // row["groups"], size, size)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=row.dtype, device=DEVICE))
        self.bias = (
            nn.Parameter(torch.zeros(channels, dtype=row.dtype, device=DEVICE)) if row["bias"] else None
        )
        self.padding, self.groups = size // 2, row["groups"]

    def forward(self, scores: Tensor) -> Tensor:
        tokens = scores.shape[-1]
        mask = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device))
        mask = mask.view(1, 1, tokens, tokens)
        inf = torch.tensor(-1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=scores.dtype)
        probabilities = functional.softmax(scores.masked_fill(~mask, inf), dim=-1)
        mixed = functional.conv2d(
            probabilities, self.weight, self.bias, stride=1, padding=self.padding, groups=self.groups
        )
        return mixed.masked_fill(~mask, zero)


def multi_token_attention(row: Row) -> Bench:
    """Of square scores. The workspace of cuDNN's convolution is in what was measured, and not here."""
    layer, theirs = MultiTokenAttention(row), MultiTokenAttention(row)
    x = torch.randn(row["B"], row["C_in"], row["L"], row["L"], dtype=row.dtype, device=DEVICE)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return Bench(lambda: layer(x), gradients=(gradient,), kept=(theirs,))


OPERATIONS: Mapping[str, Callable[[Row], Bench]] = {
    "dyt": dynamic_tanh,
    "multi_token_attention": multi_token_attention,
}
