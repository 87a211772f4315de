"""Pruning and partial quantization on scikit-learn's digits: bytes and accuracy, before and after tuning.

    python benchmarks/ladder_pruning.py        two tables, as Markdown

A network of 64-256-256-10, AdamW, 150 steps on 1,400 images, 397 held out; fine-tuned for 60. Three seeds;
accuracy is their mean, and the range.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from memfit import PartialQuantization, Pruning, prune_structured, undo
from memfit.techniques.pruning_sparse import to_sparse

SEEDS, STEPS, MORE = (0, 1, 2), 150, 60
TRAINED = 1400


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and digits: trained on, and held out."""
    digits = load_digits()
    torch.manual_seed(seed)
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    return x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, technique: Pruning | None = None) -> None:
    """Full batches; a technique holds its zeros meanwhile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if technique is not None:
        technique.apply(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers as they are stored, sparse ones by their parts."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    for buffer in model.buffers():
        if buffer.layout == torch.sparse_csr:
            parts = (buffer.values(), buffer.col_indices(), buffer.crow_indices())
            total += sum(part.numel() * part.element_size() for part in parts)
        else:
            total += buffer.numel() * buffer.element_size()
    return total


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def row(name: str, prune: Callable[[nn.Module, tuple[Tensor, ...]], tuple[float, nn.Module]]) -> None:
    """Trains, prunes, fine-tunes; prints the row."""
    before, at_once, after, sizes = [], [], [], []
    for seed in SEEDS:
        sets = data(seed)
        model = network(seed)
        train(model, sets[0], sets[1], STEPS)
        before.append(accuracy(model, sets[2], sets[3]))
        first, model = prune(model, sets)
        at_once.append(first)
        after.append(accuracy(model, sets[2], sets[3]))
        sizes.append(weight_bytes(model))
    print(f"| {name} | {sizes[0]:,} | {_mean(before)} | {_mean(at_once)} | {_mean(after)} |")


def _mean(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} % ({100 * min(values):.1f}–{100 * max(values):.1f})"


def structured(share: float) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[float, nn.Module]]:
    def prune(model: nn.Module, sets: tuple[Tensor, ...]) -> tuple[float, nn.Module]:
        prune_structured(model, sets[0][:2], share=share)
        first = accuracy(model, sets[2], sets[3])
        train(model, sets[0], sets[1], MORE)
        return first, model

    return prune


def zeros(
    technique: Pruning, *, sparse: bool
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[float, nn.Module]]:
    def prune(model: nn.Module, sets: tuple[Tensor, ...]) -> tuple[float, nn.Module]:
        pruned = technique.apply(copy.deepcopy(model))
        first = accuracy(pruned, sets[2], sets[3])
        undo(pruned)
        train(model, sets[0], sets[1], MORE, technique)
        kept = copy.deepcopy(model)
        if sparse:
            to_sparse(kept)
        return first, kept

    return prune


def quantized(
    technique: PartialQuantization,
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[float, nn.Module]]:
    def apply(model: nn.Module, sets: tuple[Tensor, ...]) -> tuple[float, nn.Module]:
        loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        chosen, _ = technique.choose(model, [(sets[0], sets[1])], loss, tolerance=0.05)
        chosen.apply(model)
        return accuracy(model, sets[2], sets[3]), model

    return apply


if __name__ == "__main__":
    print("| | bytes of weights | before | at once | after fine-tuning |\n|---|---|---|---|---|")
    row(
        "plain, trained as much longer",
        lambda m, s: (accuracy(m, s[2], s[3]), (train(m, s[0], s[1], MORE), m)[1]),
    )
    for share in (0.25, 0.5, 0.75):
        row(f"structured, {share:.0%} of the channels", structured(share))
    for share in (0.5, 0.8, 0.95):
        row(f"magnitude, {share:.0%}, as CSR", zeros(Pruning(share=share), sparse=True))
    row("2:4, dense", zeros(Pruning(pattern="2:4"), sparse=False))
    row("int8, safe layers", quantized(PartialQuantization(kind="int8")))
    row("NF4, safe layers", quantized(PartialQuantization(kind="nf4")))
