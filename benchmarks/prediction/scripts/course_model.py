"""The transformer of a public course assignment (CS336, Stanford), by the operations that it runs.

Every softmax and loss is of its own making, so that none of PyTorch's fused ones is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Without a bias."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...a,ba->...b", x, self.weight)


class Embedding(nn.Module):
    """A table that is indexed."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Norm(nn.Module):
    """Root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Positions(nn.Module):
    """Rotary, from a table that all blocks share."""

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, context, size // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.table[:, : x.size(-2), :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """By its formula."""
    shifted = x - torch.max(x, dim=dim, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=dim, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot products."""
    scores = torch.einsum("...ab,...cb->...ac", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...ab,...bc->...ac", weights, v)


class SelfAttention(nn.Module):
    """Causal, with several heads."""

    def __init__(self, width: int, heads: int, positions: Positions) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q = self.positions(q)
        k = self.positions(k)
        numbers = torch.arange(length, device=x.device)
        mask = numbers[:, None] >= numbers[None, :]
        mixed = attention(q, k, v, mask[None])
        mixed = mixed.transpose(1, 2).flatten(2).contiguous()
        return self.out(mixed)


class FeedForward(nn.Module):
    """With a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_silu(self.gate(x)) * self.up(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Norms come before what they feed."""

    def __init__(self, width: int, heads: int, inner: int, positions: Positions) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, positions)
        self.feed = FeedForward(width, inner)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm1(x))
        between = x + mixed
        fed = self.feed(self.norm2(between))
        return between + fed


class Transformer(nn.Module):
    """The language model; its weights are not initialised."""

    def __init__(
        self, *, vocabulary: int, context: int, width: int, layers: int, heads: int, inner: int
    ) -> None:
        super().__init__()
        self.tokens = Embedding(vocabulary, width)
        self.positions = Positions(context, width // heads)
        self.blocks = nn.ModuleList([Block(width, heads, inner, self.positions) for _ in range(layers)])
        self.norm = Norm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """By its formula."""
    negative = -_log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def _log_softmax(x: Tensor) -> Tensor:
    most = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - most
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """One parameter after the other, out of place: the old moments live until the new ones are stored."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            rate, time = self.param_groups[0]["lr"], state.get("t", 1)
            now = rate * (math.sqrt(1 - 0.999**time) / (1 - 0.9**time))
            parameter.data -= rate * 0.01 * parameter.data
            old_first = state.get("m", torch.zeros_like(gradient))
            old_second = state.get("v", torch.zeros_like(gradient))
            first = 0.9 * old_first + ((1 - 0.9) * gradient)
            second = 0.999 * old_second + ((1 - 0.999) * torch.square(gradient))
            parameter.data -= now * first / (torch.sqrt(second) + 1e-8)
            state["m"], state["v"], state["t"] = first, second, time + 1
