"""The two vision transformers that low-bit optimizers were measured on, from their public configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PATCH, IMAGE, CLASSES = 14, 224, 45


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Sizes of a model.

    Args:
        width, depth, heads: of its blocks.
        inner: width between a block's two linear layers.
        gated: whether the first of these makes a gate too, and blocks end in a scale (DINOv2's giant).
    """

    width: int
    depth: int
    heads: int
    inner: int
    gated: bool = False


CONFIGURATIONS = {
    "huge": Configuration(width=1280, depth=32, heads=16, inner=5120),
    "giant-dinov2": Configuration(width=1536, depth=40, heads=24, inner=4096, gated=True),
}


class _Attention(nn.Module):
    def __init__(self, c: Configuration) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = functional.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(batch, tokens, width)
        return self.out(x)


class _FeedForward(nn.Module):
    def __init__(self, c: Configuration) -> None:
        super().__init__()
        self.gated = c.gated
        self.up = nn.Linear(c.width, c.inner * (2 if c.gated else 1))
        self.down = nn.Linear(c.inner, c.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = functional.silu(gate) * x
        else:
            x = functional.gelu(x)
        return self.down(x)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Block(nn.Module):
    def __init__(self, c: Configuration) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width, eps=1e-6), _Attention(c)
        self.scale1 = _Scale(c.width) if c.gated else nn.Identity()
        self.norm2, self.feed = nn.LayerNorm(c.width, eps=1e-6), _FeedForward(c)
        self.scale2 = _Scale(c.width) if c.gated else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1(self.attention(self.norm1(x)))
        return x + self.scale2(self.feed(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks, a head.

    Args:
        name: of `CONFIGURATIONS`.
        checkpointing: whether each block is computed again in the backward pass.
    """

    def __init__(self, name: str, *, checkpointing: bool = False) -> None:
        super().__init__()
        c = CONFIGURATIONS[name]
        self.checkpointing = checkpointing
        self.patches = nn.Conv2d(3, c.width, PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, c.width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (IMAGE // PATCH) ** 2, c.width))
        self.blocks = nn.ModuleList([_Block(c) for _ in range(c.depth)])
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = nn.Linear(c.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x)[:, 0])
