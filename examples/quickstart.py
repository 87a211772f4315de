"""A training script that takes a plan: what is trained, and a loop that holds for every plan.

    memfit fit examples/quickstart.py:workload --gpu rtx3060-12gb --budget 600MiB --plan plan.json
    python examples/quickstart.py plan.json

The first line needs no GPU. The second trains on the GPU that is there, or on the CPU a small step.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import memfit


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
    return nn.Sequential(*blocks)


def batch(size: str = "full") -> torch.Tensor:
    return torch.randn(16384 if size == "full" else 256, 256)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def workload() -> memfit.Workload:
    return memfit.Workload(name="six blocks", model=model, batch=batch, loss=loss)


def main(plan_file: str | None = None, steps: int = 5) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    plan = None if plan_file is None else memfit.Plan.load(plan_file)
    if plan is not None:
        plan.apply(net, optimizer)

    losses = []
    for _ in range(steps):
        whole = batch("full" if device == "cuda" else "small").to(device)
        total = 0.0
        for part, weight in [(whole, 1.0)] if plan is None else plan.micro_batches(whole):
            value = loss(net, part) * weight
            value.backward()
            total += value.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    print("losses", *(f"{value:.5f}" for value in losses))
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
