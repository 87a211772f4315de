"""A small U-Net as a workload: `benchmarks/planner.py` plans for it."""

from __future__ import annotations

import torch
from torch import nn

from memfit.core.workload import Workload

WIDTHS = (64, 128, 256, 512)


class Double(nn.Module):
    """Two convolutions, each with batch norm and ReLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (inside, outside):
            layers += [
                nn.Conv2d(before, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
            ]  # fmt: skip
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to features."""
        features: torch.Tensor = self.layers(x)
        return features


class UNet(nn.Module):
    """Four levels down, three up, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(a, b) for a, b in zip((3, *WIDTHS), WIDTHS, strict=False)])
        self.lift = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
        )
        self.up = nn.ModuleList([Double(2 * a, a) for a in WIDTHS[:-1]])
        self.head = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to a class per pixel."""
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([skips[level], self.lift[level](x)], 1))
        logits: torch.Tensor = self.head(x)
        return logits


def unet() -> Workload:
    """Batch 8 of 256 by 256 pixels."""
    return Workload(
        name="U-Net (batch 8, 256 pixels)",
        model=UNet,
        batch=lambda: (torch.randn(8, 3, 256, 256), torch.zeros(8, 256, 256, dtype=torch.long)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
