"""What `MemoryProfiler` costs: a small GPT on the CPU, plain and profiled steps in turn, in one process.

    OMP_NUM_THREADS=1 python benchmarks/profiler_overhead.py

Each pair is one plain stretch and one profiled stretch, one after the other (which first, alternates), so
that both meet the same machine. The result is the median of the pairs' ratios, with its quartiles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from memfit import MemoryProfiler


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, vocabulary: int = 8192, length: int = 256) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def training(batch: int) -> Callable[[], None]:
    """A model with its optimizer; each call is one step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 8192, (batch, 257))

    def step() -> None:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[], None], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began


def profiled_seconds(step: Callable[[], None], count: int, frequency: int, first: int) -> float:
    """The time of ``count`` steps of a profiler that has ``first`` steps behind it."""
    profiler = MemoryProfiler(profiling_frequency=frequency, device="cpu")
    profiler.start_profiling()
    for _ in range(first):
        step()
    took = seconds_of(step, count)
    profiler.stop_profiling()
    return took


def paired(step: Callable[[], None], *, pairs: int, count: int, frequency: int, first: int) -> list[float]:
    ratios = []
    for pair in range(pairs):
        gc.collect()
        if pair % 2:
            measured = profiled_seconds(step, count, frequency, first)
            plain = seconds_of(step, count)
        else:
            plain = seconds_of(step, count)
            measured = profiled_seconds(step, count, frequency, first)
        ratios.append(measured / plain)
    return ratios


def report(name: str, ratios: list[float]) -> None:
    low, middle, high = (100 * (q - 1) for q in statistics.quantiles(ratios, n=4))
    print(f"| {name} | {middle:+.2f} % | {low:+.2f} to {high:+.2f} % | {len(ratios)} |", flush=True)


def light_seconds(count: int = 5000) -> float:
    """What the profiler adds to a step that is not detailed: two hooks, on an optimizer without work."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    plain = seconds_of(optimizer.step, count)
    return (profiled_seconds(optimizer.step, count, 10**6, first=2) - plain) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = training(arguments.batch)
    for _ in range(3):
        step()
    plain = seconds_of(step, 5) / 5
    light = statistics.median(light_seconds() for _ in range(9))
    print(f"a plain step takes {plain * 1e3:.0f} ms of processor time")
    print(f"a step that is not detailed takes {light * 1e6:.0f} µs more ({100 * light / plain:.4f} %)\n")
    print("| what | over plain, median | quartiles | pairs |\n|---|---|---|---|", flush=True)
    every = paired(step, pairs=arguments.pairs, count=1, frequency=1, first=2)
    report("a detailed step (`profiling_frequency=1`)", every)
    for frequency, name in ((10, "the default"), (100, "sampling")):
        mixed = [1 + (ratio - 1) / frequency + light / plain for ratio in every]
        report(f"{name} (`profiling_frequency={frequency}`), from the two above", mixed)
    ten = paired(step, pairs=max(arguments.pairs // 3, 3), count=10, frequency=10, first=2)
    report("the default, measured over 10 steps", ten)


if __name__ == "__main__":
    main()
