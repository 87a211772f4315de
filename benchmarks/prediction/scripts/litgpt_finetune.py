"""Fine-tuning a language model as LitGPT's scripts do, in bf16.

litgpt_finetune.py '{"model": …, "method": …}'
"""

from __future__ import annotations

import json
import sys

import torch
from litgpt_models import GPT, SIZES, Method
from reading import DEVICE
from torch.nn import functional

STEPS, ACCUMULATED = 2, 2


def main() -> None:
    """Two optimizer steps of two micro-batches on the longest sample."""
    given = json.loads(sys.argv[1])
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(SIZES[given["model"]], Method(**given["method"])).to(DEVICE)
    model.train()
    updates = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.01
    )
    for _ in range(STEPS):
        for _ in range(ACCUMULATED):
            tokens = torch.randint(0, 1000, (given["batch"], given["tokens"])).to(DEVICE)
            logits = model(tokens)
            logits[-1] = logits[-1][..., :-1, :]
            (_loss(logits, tokens[:, 1:]) / ACCUMULATED).backward()
        updates.step()
        updates.zero_grad()


def _loss(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy piece by piece."""
    sizes = [part.shape[1] for part in logits]
    losses = [
        functional.cross_entropy(part.reshape(-1, part.shape[-1]), target.reshape(-1), reduction="none")
        for part, target in zip(logits, targets.split(sizes, dim=1), strict=True)
    ]
    return torch.cat(losses).mean()


if __name__ == "__main__":
    main()
