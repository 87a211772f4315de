"""Ten small training workloads, and running one with the allocator's history on.

    python benchmarks/gpu/small_steps.py NAME FILE

writes the events of two steps (signed sizes of allocations and frees) and the peaks as JSON. Needs PyTorch
alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
STEPS = 2
MOST_EVENTS = 200_000


def main() -> None:
    """Builds, trains, and writes what the allocator did."""
    name, file = sys.argv[1:]
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context=None)
    step = WORKLOADS[name]()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    told = {
        "events": [signed for event in events if (signed := _signed(event))],
        "segments": [event["size"] for event in events if event["action"] == "segment_alloc"],
        "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "torch": torch.__version__,
    }
    Path(file).write_text(json.dumps(told), encoding="utf-8")


def _signed(event: Mapping[str, Any]) -> int:
    """Bytes asked for by an allocation, less than zero when they are freed; 0 for other events."""
    return {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * int(event["size"])


# ------------------------------------------------------------------------- what is trained


class Block(nn.Module):
    """A transformer's block, with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A small language model; with ``recompute``, each block is checkpointed."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.head = nn.Embedding(8192, 512), nn.Linear(512, 8192, bias=False)
        self.blocks = nn.ModuleList(Block(512, 8) for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions with batch norm, around them a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
        self.norm_first, self.norm_second = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norm_first(self.first(x)), inplace=True)
        return functional.relu(self.norm_second(self.second(inner)) + self.shortcut(x), inplace=True)


def _residual_net() -> nn.Module:
    stages = [Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


# ----------------------------------------------------------------------------- ten steps


def _classify(model: nn.Module, data: torch.Tensor, classes: int, **settings: Any) -> Step:
    labels = torch.randint(0, classes, (data.shape[0],), device="cuda")

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(data).float(), labels)

    return _step(model, loss, **settings)


def _speak(model: nn.Module, **settings: Any) -> Step:
    tokens = torch.randint(0, 8192, (8, 257), device="cuda")

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return _step(model, loss, **settings)


def _step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    half: torch.dtype | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Step:
    updates = optimizer(model.parameters(), lr=1e-4, **options)

    def step() -> None:
        for _ in range(accumulate):
            with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
                value = loss()
            (value / accumulate).backward()
        updates.step()
        updates.zero_grad()

    return step


def _images(side: int = 128) -> torch.Tensor:
    return torch.randn(32, 3, side, side, device="cuda")


def _recurrent() -> Step:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x)[0][:, -1])

    return _classify(Reader().cuda(), torch.randn(32, 64, 256, device="cuda"), 10)


def _last_channels() -> Step:
    model = _residual_net().cuda().to(memory_format=torch.channels_last)
    data = _images().to(memory_format=torch.channels_last)
    return _classify(model, data, 100, half=torch.bfloat16)


WORKLOADS: Mapping[str, Callable[[], Step]] = {
    "perceptron, AdamW": lambda: _classify(_perceptron().cuda(), torch.randn(512, 1024, device="cuda"), 10),
    "perceptron, SGD with momentum, one by one": lambda: _classify(
        _perceptron().cuda(),
        torch.randn(512, 1024, device="cuda"),
        10,
        optimizer=torch.optim.SGD,
        momentum=0.9,
        foreach=False,
    ),
    "residual net, fp32": lambda: _classify(_residual_net().cuda(), _images(), 100),
    "residual net, bf16, channels last": _last_channels,
    "LSTM": _recurrent,
    "GPT, fp32": lambda: _speak(GPT().cuda()),
    "GPT, bf16 autocast": lambda: _speak(GPT().cuda(), half=torch.bfloat16),
    "GPT, fp16 autocast, fused AdamW": lambda: _speak(GPT().cuda(), half=torch.float16, fused=True),
    "GPT, checkpointed": lambda: _speak(GPT(recompute=True).cuda(), half=torch.bfloat16),
    "GPT, 4 micro-batches": lambda: _speak(GPT().cuda(), half=torch.bfloat16, accumulate=4),
}
"""The ten, by name."""

if __name__ == "__main__":
    main()
