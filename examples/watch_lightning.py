"""Watch the memory of a Lightning training: one callback.

python examples/watch_lightning.py
"""

from __future__ import annotations

import lightning as L
import torch

from memfit.monitor.callbacks import lightning_callback


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        (x,) = batch
        return (self.layer(x) - x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(steps: int = 4, **settings: object) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps, 32))
    callback = lightning_callback(**settings)
    trainer = L.Trainer(
        max_epochs=1, accelerator="auto", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8))
    print("records in", callback.watcher.folder)


if __name__ == "__main__":
    main()
