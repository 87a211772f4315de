"""LitGPT's language models by the sizes in its public configurations, with its fine-tuning methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from litgpt_quantized import Linear4bit
from torch import nn
from torch.nn import functional

PROMPT_TOKENS, FIRST_ADAPTED_LAYER = 10, 2


@dataclass(frozen=True)
class Sizes:
    """One model's configuration."""

    layers: int
    heads: int
    groups: int
    width: int
    head: int
    inner: int
    vocabulary: int
    gated: bool = True  # SwiGLU and RMSNorm; else GELU and LayerNorm
    parallel: bool = False
    shared_norm: bool = False
    bias: bool = False
    rotary: float = 1.0
    post_norms: bool = False


SIZES: Mapping[str, Sizes] = {
    "phi-1.5": Sizes(24, 32, 32, 2048, 64, 8192, 51200, False, True, True, True, 0.5),
    "phi-2": Sizes(32, 32, 32, 2560, 80, 10240, 51200, False, True, True, True, 0.4),
    "phi-3-mini-4k": Sizes(32, 32, 32, 3072, 96, 8192, 32064),
    "stablelm-3b": Sizes(16, 32, 32, 4096, 128, 16384, 50688, False, True, False, True, 0.25),
    "stablelm-base-alpha-3b": Sizes(16, 32, 32, 4096, 128, 16384, 50688, False, True, False, True, 0.25),
    "falcon-7b": Sizes(32, 71, 1, 4544, 64, 18176, 65024, False, True, True, False),
    "llama2-7b": Sizes(32, 32, 32, 4096, 128, 11008, 32000),
    "llama-2-7b": Sizes(32, 32, 32, 4096, 128, 11008, 32000),
    "llama2-13b": Sizes(40, 40, 40, 5120, 128, 13824, 32000),
    "llama-3-8b": Sizes(32, 32, 8, 4096, 128, 14336, 128256),
    "llama-3.1-8b": Sizes(32, 32, 8, 4096, 128, 14336, 128256),
    "llama-3.2-1B": Sizes(16, 32, 8, 2048, 64, 8192, 128256),
    "llama-3.2-3B": Sizes(28, 24, 8, 3072, 128, 8192, 128256),
    "mistral-7b": Sizes(32, 32, 8, 4096, 128, 14336, 32000),
    "mistral-7b-v0.2": Sizes(32, 32, 8, 4096, 128, 14336, 32000),
    "tiny-llama": Sizes(22, 32, 4, 2048, 64, 5632, 32000),
    "gemma-2b": Sizes(18, 8, 1, 2048, 256, 16384, 256000),
    "gemma-7b": Sizes(28, 16, 16, 3072, 256, 24576, 256000),
    "gemma-2-2b": Sizes(26, 8, 4, 2304, 256, 9216, 256000, post_norms=True),
    "gemma-2-9b": Sizes(42, 16, 8, 3584, 256, 14336, 256000, post_norms=True),
}


@dataclass(frozen=True)
class Method:
    """How it is fine-tuned.

    ``rank`` 0: no LoRA. ``everywhere``: LoRA in all linear layers and the head, else in queries and values.
    """

    name: str
    quantized: str = "none"
    rank: int = 8
    everywhere: bool = False
    dropout: float = 0.05
    weighs_wide: bool = False  # norms multiply by their weight in fp32, as in 2023


class RMSNorm(nn.Module):
    """Written out and in fp32, as in LitGPT since commit 6178c7c (2023-10-24)."""

    def __init__(self, width: int, weighs_wide: bool) -> None:
        super().__init__()
        self.weight, self.weighs_wide = nn.Parameter(torch.ones(width)), weighs_wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        if self.weighs_wide:
            return (self.weight * normed).to(dtype)
        return normed.to(dtype) * self.weight


def _base(before: int, after: int, bias: bool, method: Method) -> nn.Module:
    if method.quantized == "none":
        return nn.Linear(before, after, bias=bias)
    return Linear4bit(before, after, bias, double=method.quantized == "nf4-dq")


class Tuned(nn.Module):
    """A linear layer with LoRA, with adapter v2's scale and bias, or plain."""

    def __init__(self, before: int, after: int, bias: bool, method: Method, lora: bool) -> None:
        super().__init__()
        self.linear = _base(before, after, bias, method)
        self.lora = lora and method.rank > 0
        self.scaled = method.name == "adapter_v2"
        if self.lora:
            self.dropout = nn.Dropout(method.dropout)
            self.lora_a = nn.Parameter(torch.zeros(method.rank, before))
            self.lora_b = nn.Parameter(torch.zeros(after, method.rank))
        if self.scaled:
            self.adapter_bias, self.adapter_scale = (nn.Parameter(torch.zeros(after)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.lora:
            y = y + (self.dropout(x) @ self.lora_a.T @ self.lora_b.T) * 2.0
        return self.adapter_scale * (y + self.adapter_bias) if self.scaled else y


class TunedQKV(nn.Module):
    """Queries, keys and values in one matrix, with LoRA in queries and values, padded with zeros for keys."""

    def __init__(self, sizes: Sizes, method: Method) -> None:
        super().__init__()
        total, kept = (sizes.heads + 2 * sizes.groups) * sizes.head, sizes.groups * sizes.head
        self.linear = _base(sizes.width, total, sizes.bias, method)
        self.parts = [sizes.heads * sizes.head, kept]
        self.dropout = nn.Dropout(method.dropout)
        self.lora_a = nn.Parameter(torch.zeros(2 * method.rank, sizes.width))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.parts), method.rank))
        places = torch.cat([torch.arange(self.parts[0]), torch.arange(total - kept, total)])
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        after = functional.linear(self.dropout(x), self.lora_a).chunk(2, -1)
        both = torch.cat([a @ b.T for a, b in zip(after, self.lora_b.split(self.parts), strict=True)], -1)
        padded = x.new_zeros(y.shape).index_copy(-1, self.places, both)
        return y + padded * 2.0


def _norm(sizes: Sizes, method: Method) -> nn.Module:
    return RMSNorm(sizes.width, method.weighs_wide) if sizes.gated else nn.LayerNorm(sizes.width)


class Block(nn.Module):
    """Attention and a multi-layer perceptron, one after the other or side by side."""

    def __init__(self, sizes: Sizes, method: Method, layer: int) -> None:
        super().__init__()
        self.sizes = sizes
        everywhere = method.everywhere
        total = (sizes.heads + 2 * sizes.groups) * sizes.head
        inside = method.rank > 0 and not everywhere
        self.qkv = (
            TunedQKV(sizes, method) if inside else Tuned(sizes.width, total, sizes.bias, method, everywhere)
        )
        self.proj = Tuned(sizes.heads * sizes.head, sizes.width, sizes.bias, method, everywhere)
        ups = 2 if sizes.gated else 1
        self.up = nn.ModuleList(
            Tuned(sizes.width, sizes.inner, sizes.bias, method, everywhere) for _ in range(ups)
        )
        self.down = Tuned(sizes.inner, sizes.width, sizes.bias, method, everywhere)
        self.norm_1 = _norm(sizes, method)
        self.norm_2 = None if sizes.shared_norm else _norm(sizes, method)
        self.after = nn.ModuleList(_norm(sizes, method) for _ in range(2 * sizes.post_norms))
        self.prompt: nn.Embedding | None = None
        if method.name.startswith("adapter") and layer >= FIRST_ADAPTED_LAYER:
            self.prompt = nn.Embedding(PROMPT_TOKENS, sizes.width)
            self.gate = nn.Parameter(torch.zeros(1, 1, sizes.heads, 1))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first = self.norm_1(x)
        mixed = self._attend(first, cos, sin)
        if self.sizes.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return self._perceive(second) + mixed + x
        x = (self.after[0](mixed) if self.after else mixed) + x
        assert self.norm_2 is not None
        seen = self._perceive(self.norm_2(x))
        return (self.after[1](seen) if self.after else seen) + x

    def _perceive(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sizes.gated:
            return self.down(functional.gelu(self.up[0](x)))
        return self.down(functional.silu(self.up[0](x)) * self.up[1](x))

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s, (batch, tokens, _) = self.sizes, x.shape
        each = s.heads // s.groups
        parts = self.qkv(x).view(batch, tokens, s.groups, each + 2, s.head).permute(0, 2, 3, 1, 4)
        q, k, v = parts.split((each, 1, 1), dim=2)
        if s.groups != s.heads:
            k, v = (part.expand(batch, s.groups, each, tokens, s.head) for part in (k, v))
        return tuple(part.reshape(batch, -1, tokens, s.head) for part in (q, k, v))

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(x)
        turned = cos.shape[-1]
        q, k = (torch.cat((_turn(part[..., :turned], cos, sin), part[..., turned:]), -1) for part in (q, k))
        attend = _capped if self.sizes.post_norms else _kernel  # Gemma 2 has both
        y = attend(q, k, v).transpose(1, 2)
        if self.prompt is not None:
            _, ak, av = self._split(self.prompt.weight[None])
            mask = torch.ones(x.shape[1], PROMPT_TOKENS, dtype=torch.bool, device=x.device)
            size = (x.shape[0], *ak.shape[1:])
            extra = functional.scaled_dot_product_attention(q, ak.expand(size), av.expand(size), mask)
            y = y + self.gate * extra.transpose(1, 2)
        return self.proj(y.reshape(*x.shape[:2], -1))


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores that are capped, for which there was no kernel: LitGPT's Gemma 2."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    mask = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).triu(diagonal=1)
    mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
    scores = scores + mask
    return functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


class GPT(nn.Module):
    """The model, with the parameters of its method to train, and the others frozen."""

    def __init__(self, sizes: Sizes, method: Method) -> None:
        super().__init__()
        self.sizes, self.tokens = sizes, nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, method, layer) for layer in range(sizes.layers))
        self.norm = _norm(sizes, method)
        self.head = Tuned(sizes.width, sizes.vocabulary, False, method, method.everywhere)
        if method.name != "full":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(_trains(name, method))

    def forward(self, tokens: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """The logits, in pieces of ``chunk`` tokens."""
        x = self.tokens(tokens)
        turned = int(self.sizes.rotary * self.sizes.head)
        cos, sin = (
            torch.zeros(tokens.shape[1], turned, dtype=torch.float32, device=x.device) for _ in range(2)
        )
        for block in self.blocks:
            x = block(x, cos, sin)
        return [self.head(part) for part in self.norm(x).split(chunk, dim=1)]


def _trains(name: str, method: Method) -> bool:
    if method.name == "lora":
        return "lora_" in name
    own = "prompt" in name or "gate" in name
    return own or method.name == "adapter_v2" and ("adapter_" in name or "norm" in name)
