"""Steps of training that the cases share. Everything is small: what counts is that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 2
Loss = Callable[[], Tensor]


def train(
    model: nn.Module,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: torch.dtype | None = torch.bfloat16,
    steps: int = STEPS,
) -> None:
    """Steps of AdamW (or ``optimizer``) under autocast."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens(vocabulary: int = 1000, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape or (2, 64), device="cuda")


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.mlp(x)


class GPT(nn.Module):
    """A language model of two blocks."""

    def __init__(self, width: int = 128, blocks: int = 2, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt_loss(model: nn.Module) -> Loss:
    ids = tokens(1000, 4, 65)
    return lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def cnn() -> nn.Module:
    """Convolutions, batch norm and a classifier."""
    layers: list[nn.Module] = []
    for wide_in, wide in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(wide_in, wide, 3, 2, 1), nn.BatchNorm2d(wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def image_loss(model: nn.Module, size: int = 32, **layout: Any) -> Loss:
    images = torch.randn(4, 3, size, size, device="cuda")
    images = images.to(**layout) if layout else images
    labels = torch.randint(10, (4,), device="cuda")
    return lambda: F.cross_entropy(model(images), labels)
