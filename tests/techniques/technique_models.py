"""Models of many kinds, small, with a batch and a loss each: what every technique must leave right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.techniques import mixed_precision_of


@dataclass(frozen=True)
class Case:
    """A model, its batch, its loss. All three are made from the same seed on every call."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    blocks: int
    language: bool = False


class MLPBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(x)))


class GPTBlock(nn.Module):
    """As people write it: a mask given by keyword, dropout in three places."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        packed = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        x = x + scale * self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(self, vocabulary: int = 97, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(GPTBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x, scale=0.5)
        return self.head(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out, momentum=None)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + skip)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 8))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Stateful(nn.Module):
    """Changes everything a forward can change: a power iteration, a moving average, a counter, an
    attribute."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.out = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("replaced", torch.zeros(width))
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.replaced = self.replaced * 0.5 + x.detach().amax(0)
        self.last = x.detach()
        y = torch.tanh(self.mix(x) + self.average + self.replaced) * self.calls
        return x + self.out(y)


class PairBlock(nn.Module):
    """T5's habit: tuples in, tuples out, with tensors that pass through and ``None`` among them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, hidden: Tensor, bias: Tensor | None = None, extra: tuple[Tensor, None] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = self.wo(self.dropout(torch.relu(self.wi(hidden))))
        y = y if bias is None else y * bias
        return hidden + y + (0 if extra is None else extra[0]), bias


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(PairBlock(width) for _ in range(2))
        self.decoder = nn.ModuleList(PairBlock(width) for _ in range(2))
        self.bias = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        memory = x
        for block in self.encoder:
            memory, bias = block(memory, bias=bias)
        for block in self.decoder:
            x, _ = block(hidden=x, extra=(memory, None))
        return x


class RecurrentBlock(nn.Module):
    """Gates are parts of one storage, each changed in place, whose versions do not know of each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.gru(x, state)
        return x + self.lstm(y)[0], state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor | None = None
        for block in self.blocks:
            x, state = block(x, state)
        return x


class AdapterBlock(nn.Module):
    """A frozen layer with a low-rank adapter; arguments that are ``None`` and float."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.b = nn.Parameter(torch.randn(width, rank) * 0.1)
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.base(x) + scale * (x @ self.a.T @ self.b.T)
        return torch.tanh(y if mask is None else y * mask)


class Frozen(nn.Module):
    """Nothing before the blocks trains, and nothing after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(AdapterBlock(16) for _ in range(3))
        self.head = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, None, 0.5)
        return self.head(x)


def _regression(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), (batch["ids"].flatten() * 7 + 3) % 97)


def _hf(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        return make()

    return made


def _hf_model(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

        autos = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
        config = AutoConfig.for_model(kind, vocab_size=211, **settings)
        return autos.get(kind, AutoModelForCausalLM).from_config(config).train()

    return _seeded(make)


def _hf_batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 211, (4, 9))
    return {"input_ids": ids, "labels": (ids * 7 + 3) % 211}


def _x(*shape: int) -> Callable[[], dict[str, Tensor]]:
    return _seeded(lambda: {"x": torch.randn(*shape), "y": torch.arange(shape[0]) % 10})


def _ids(high: int) -> Callable[[], dict[str, Tensor]]:
    return _seeded(lambda: {"ids": torch.randint(0, high, (4, 9))})


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *[MLPBlock(16) for _ in range(3)], nn.Linear(16, 10))


_LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", _seeded(_mlp), _x(4, 8), _classes, 3),
        Case("gpt", _seeded(GPT), _ids(97), _tokens, 3, language=True),
        Case("cnn", _seeded(CNN), _x(4, 3, 8, 8), _classes, 4),
        Case(
            "stateful",
            _seeded(lambda: nn.ModuleList([Stateful(), Stateful()]).append(nn.Identity())),
            _x(4, 16),
            lambda model, batch: model[1](model[0](batch["x"])).square().mean(),
            2,
        ),
        Case("recurrent", _seeded(Recurrent), _x(4, 5, 16), _regression, 2),
        Case("encoder-decoder", _seeded(EncoderDecoder), _x(4, 5, 16), _regression, 4),
        Case(
            "frozen",
            _seeded(Frozen),
            _ids(50),
            lambda model, batch: model(batch["ids"]).square().mean(),
            3,
        ),
        Case("hf-gpt2", _hf_model("gpt2", n_embd=32, n_layer=2, n_head=4), _seeded(_hf_batch), _hf, 2, True),
        Case(
            "hf-bert",
            _hf_model("bert", **_LLAMA),
            _seeded(_hf_batch),
            _hf,
            2,
            True,
        ),
        Case("hf-llama", _hf_model("llama", **_LLAMA), _seeded(_hf_batch), _hf, 2, True),
        Case(
            "hf-t5",
            _hf_model("t5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
            _seeded(_hf_batch),
            _hf,
            4,
            True,
        ),
    )
}


@dataclass(frozen=True)
class Trained:
    """All that a few steps leave behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random: Tensor
    attributes: list[Any]


def train(
    case: Case,
    prepare: Callable[[nn.Module, torch.optim.Optimizer], Any] | None = None,
    *,
    steps: int = 3,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> Trained:
    """Trains the case's model; ``prepare`` gets model and optimizer before the first step."""
    model = case.model() if model is None else model
    model = model if dtype is None else model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if prepare is not None:
        prepare(model, optimizer)
    torch.manual_seed(1)
    losses, gradients = [], {}
    for _ in range(steps):
        loss = case.loss(model, cast(case.batch(), dtype))
        precision = mixed_precision_of(model)
        (loss if precision is None else precision.scale_loss(loss)).backward()
        losses.append(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Trained(
        losses,
        gradients,
        {name: p.detach() for name, p in model.named_parameters()},
        dict(model.named_buffers()),
        torch.get_rng_state(),
        [getattr(module, "calls", None) for module in model.modules()],
    )


def cast(batch: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {k: v.to(dtype) if dtype is not None and v.is_floating_point() else v for k, v in batch.items()}


def assert_bitwise(plain: Trained, changed: Trained) -> None:
    """Loss, gradients, parameters after the steps, buffers, random state and counters: equal to the bit."""
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, changed.losses, strict=True)), "loss"
    for kind in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(plain, kind), getattr(changed, kind)
        assert ours.keys() == theirs.keys(), kind
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), f"{kind}: {name}"
    assert torch.equal(plain.random, changed.random), "random state"
    assert plain.attributes == changed.attributes, "attributes"


def assert_close(plain: Trained, changed: Trained, tolerance: float) -> None:
    """Losses and last gradients within ``tolerance`` (of the largest gradient)."""
    for a, b in zip(plain.losses, changed.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert plain.gradients.keys() == changed.gradients.keys()
    scale = max((float(gradient.abs().max()) for gradient in plain.gradients.values()), default=1.0)
    for name, gradient in plain.gradients.items():
        assert float((gradient - changed.gradients[name]).abs().max()) <= tolerance * scale, name
