"""Small models, each with a batch and a loss, whose behaviour the tests know."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit.core.workload import Workload


class MLP(nn.Module):
    def __init__(self, width=128, layers=3):
        super().__init__()
        parts = [
            part for _ in range(layers) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        ]
        self.net = nn.Sequential(*parts, nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 8, 16]
        parts = [
            part
            for wide, next_wide in zip(widths, widths[1:])  # noqa: B905
            for part in (nn.Conv2d(wide, next_wide, 3, padding=1), nn.BatchNorm2d(next_wide), nn.ReLU())
        ]
        self.net, self.head = nn.Sequential(*parts), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.net(x).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.ln1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + F.dropout(self.proj(mixed), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, layers=2, width=64, heads=4, length=32, vocabulary=256, dropout=0.1, recompute=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def predict(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


def mlp(**options):
    return Workload(
        name="mlp",
        model=MLP,
        batch=lambda: (torch.randn(64, 128), torch.randint(10, (64,))),
        loss=classify,
        **options,
    )


def cnn(**options):
    return Workload(
        name="cnn",
        model=CNN,
        batch=lambda: (torch.randn(4, 3, 16, 16), torch.randint(10, (4,))),
        loss=classify,
        **options,
    )


def gpt(recompute=None, dropout=0.1, layers=2, **options):
    return Workload(
        name="gpt",
        model=lambda: GPT(recompute=recompute, dropout=dropout, layers=layers),
        batch=lambda: (torch.randint(256, (4, 32)),),
        loss=predict,
        **options,
    )
