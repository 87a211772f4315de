"""memfit in Lightning: techniques where the module configures its model, and a callback that watches.

python examples/integrate_lightning.py
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn

import memfit
from memfit.monitor.callbacks import lightning_callback


class Net(L.LightningModule):
    def __init__(self, *, techniques: bool) -> None:
        super().__init__()
        self.techniques = techniques
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.net = nn.Sequential(*blocks)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.net.parameters())
        if self.techniques:  # a plan goes the same way: Plan.load("plan.json").apply(self.net, optimizer)
            memfit.GradientCheckpointing(checkpoint_frequency=2).apply(self.net, optimizer)
        return optimizer


def main(steps: int = 4, *, techniques: bool = True, **watching: Any) -> list[float]:
    torch.manual_seed(0)
    net = Net(techniques=techniques)
    trainer = L.Trainer(
        max_epochs=1, accelerator="auto", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lightning_callback(**watching)],
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(8 * steps, 64), batch_size=8))
    return net.losses


if __name__ == "__main__":
    print(main())
