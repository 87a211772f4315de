"""Mixed precision with the step in the right order, a step that survives out of memory, and the largest batch
size for a limit. Runs on the CPU in a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import memfit


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch), batch)


def main() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    found = memfit.find_batch_size(
        model, optimizer, loss, lambda size: torch.zeros(size, 64), limit="4MiB", start=8, multiple_of=8
    )
    print(found)

    mp = memfit.MixedPrecisionTraining(precision="fp16", max_grad_norm=1.0)
    model, optimizer = mp.apply(model, optimizer)
    step = memfit.guard(memfit.training_step(model, optimizer, loss))
    losses = [float(step(torch.randn(found.batch_size, 64))) for _ in range(20)]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, scale {mp.scale:g}, {mp.skipped_steps} steps skipped")
    print(*step.log, sep="\n")

    with mp.autocast():
        last = loss(model, torch.randn(8, 64))
    mp.scale_loss(last).backward()
    optimizer.step()
    step.close()
    assert memfit.undo(model) is mp


if __name__ == "__main__":
    main()
