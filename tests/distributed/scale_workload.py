"""Workloads for `memfit.scale`: their parameters can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from memfit import Workload

WIDTH, HIDDEN, BLOCKS, SAMPLES = 512, 2048, 3, 8
BLOCK_NUMBERS = WIDTH * HIDDEN * 2 + HIDDEN + WIDTH
HEAD_NUMBERS = WIDTH + 1


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class Attention(nn.Module):
    """Reshapes by the number of heads that it was made with: cut over ranks it mixes up positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (layer(x).view(len(x), -1, 4, 4) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        return x + self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


def feed() -> Workload:
    return Workload(
        name="feed",
        model=lambda: nn.Sequential(nn.Sequential(*(Feed() for _ in range(BLOCKS))), nn.Linear(WIDTH, 1)),
        batch=lambda: torch.randn(SAMPLES, 64, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def attention() -> Workload:
    return Workload(
        name="attention",
        model=lambda: nn.Sequential(nn.Sequential(*(Attention() for _ in range(2))), nn.Linear(16, 1)),
        batch=lambda: torch.randn(4, 8, 16),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def activations() -> Workload:
    """As `feed`, with so many samples that what blocks keep is most of the memory."""
    return replace(feed(), name="activations", batch=lambda: torch.randn(128, 64, WIDTH))
