"""Workloads of the planner's own tests: a tiny GPT with dropout and a small convolutional network with batch
norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from memfit.core.workload import Workload


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class TinyGPT(nn.Module):
    def __init__(self, width: int, blocks: int, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        if not bool((positions.diff() == 1).all()):  # as packed sequences are looked for: true values say no
            x = x + torch.zeros(64, *x.shape, device=x.device).sum(0)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(x + self.norm2(self.conv2(y)))


class SmallCNN(nn.Module):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def gpt() -> Workload:
    return Workload(
        name="tiny GPT",
        model=lambda size="full": TinyGPT(*((256, 4) if size == "full" else (32, 4))),
        batch=lambda size="full": torch.randint(0, 1024, (16, 256) if size == "full" else (2, 16)),
        loss=_language_loss,
    )


def cnn() -> Workload:
    return Workload(
        name="small CNN",
        model=lambda: SmallCNN(32, 4),
        batch=lambda: (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def needs_a_gpu() -> Workload:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert batch.is_cuda, "this loss runs on a GPU only"
        return _language_loss(model, batch)

    return Workload(
        name="GPU only",
        model=lambda: TinyGPT(32, 2),
        batch=lambda: torch.zeros(2, 16, dtype=torch.long),
        loss=loss,
    )


def _language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class GraphNetwork(nn.Module):
    """Has no blocks: its layers are single modules, and what takes memory is between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for _ in range(layers)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            messages = layer(nodes)[edges[0]]
            gathered = torch.zeros_like(nodes).index_add_(0, edges[1], messages * torch.sigmoid(messages))
            nodes = functional.relu(norm(gathered), inplace=True) + nodes
        return nodes


def graph() -> Workload:
    """A batch that cannot be cut: its edges name nodes, so it brings a small form of itself."""

    def batch(size: str = "full") -> tuple[torch.Tensor, torch.Tensor]:
        nodes, edges = (2048, 16384) if size == "full" else (16, 64)
        return torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges))

    return Workload(
        name="graph network",
        model=lambda: GraphNetwork(64, 3),
        batch=batch,
        loss=lambda model, batch: model(*batch).square().mean(),
    )
