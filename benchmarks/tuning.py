"""What only measuring finds: `memfit.tune` on a character-level GPT with a real loader, on this machine.

    python benchmarks/tuning.py [--seconds 120]      what was measured, and the choice

The model and the text are those of ``ladder_char_gpt.py``. Each sample costs the loader a millisecond of
work beside the cutting, as decoding would.
"""

from __future__ import annotations

import argparse
import time

import torch
from ladder_char_gpt import CONTEXT, CharGPT, loss, text
from torch.utils.data import DataLoader, Dataset

import memfit


class Windows(Dataset[torch.Tensor]):
    """Stretches of the text; each takes a millisecond to prepare."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + 1e-3
        start = index * 61
        sample = text()[start : start + CONTEXT + 1].long()
        while time.perf_counter() < until:
            pass
        return sample


def main() -> None:
    """Tunes, and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CharGPT()
    print(
        memfit.tune(
            model,
            torch.optim.AdamW(model.parameters()),
            loss,
            lambda size, workers: DataLoader(Windows(), batch_size=size, num_workers=workers),
            batch_size=12,
            batch_sizes=(8, 16, 32),
            workers=(1, 2),
            seconds=given.seconds,
        )
    )


if __name__ == "__main__":
    main()
