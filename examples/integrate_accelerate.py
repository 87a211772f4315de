"""memfit in an Accelerate loop: techniques before `prepare`, and a watcher in the loop.

    accelerate launch examples/integrate_accelerate.py

Precision is Accelerate's: `Accelerator(mixed_precision="bf16")`. `memfit.MixedPrecisionTraining` is a second.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import memfit


def main(steps: int = 4, *, techniques: bool = True, **watching: Any) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator()
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model: Any = nn.Sequential(*blocks)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if techniques:  # on the plain model, before prepare wraps it
        memfit.GradientCheckpointing(checkpoint_frequency=2).apply(model)
        memfit.OptimizerImplementation(implementation="for-loop").apply(model, optimizer)
    data: Any = torch.utils.data.DataLoader(torch.randn(8 * steps, 64), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    losses = []
    with memfit.watch(**watching) as watcher:
        for batch in data:
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            watcher.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
