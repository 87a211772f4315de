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

STEPS, ACCUMULATED, CHUNK = 2, 2, 128


def main() -> None:
    """Two optimizer steps of two micro-batches: one by one, a batch of the usual length and the longest."""
    given = json.loads(sys.argv[1])
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = GPT(SIZES[given["model"]], Method(**given["method"]))
    model.train()
    whole = given["method"]["name"] == "full"  # only the other scripts take the head in pieces
    updates = _optimizer(model, given["method"]["quantized"] != "none")
    for step in range(STEPS):
        for length in _lengths(given["lengths"], step):
            tokens = torch.randint(0, 1000, (given["batch"], length)).to(DEVICE)
            # Fabric turns what a model returns into the default dtype of outside, which is fp32.
            logits = [part.float() for part in model(tokens, length if whole else CHUNK)]
            logits[-1] = logits[-1][..., :-1, :]
            # Both names keep the graph of a batch until there is another: the script's own do.
            loss = _loss(logits, tokens[:, 1:])
            (loss / ACCUMULATED).backward()
        updates.step()
        updates.zero_grad()


def _lengths(lengths: list[int], step: int) -> list[int]:
    """Where the longest comes first, it does so in the first step only: the script of 2023 put it there."""
    return lengths[1:] * 2 if step and lengths[0] > lengths[1] else lengths


def _optimizer(model: torch.nn.Module, quantized: bool) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if quantized:
        import bitsandbytes

        made: torch.optim.Optimizer = bitsandbytes.optim.PagedAdamW(trained, lr=3e-4, weight_decay=0.01)
        return made
    return torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)


def _loss(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy piece by piece."""
    sizes = [part.shape[1] for part in logits]
    parts = [part.reshape(-1, part.shape[-1]) for part in logits]
    wanted = [target.reshape(-1) for target in targets.split(sizes, dim=1)]
    if len(parts) == 1:
        parts, wanted = list(parts[0].split(CHUNK)), list(wanted[0].split(CHUNK))
    losses = [
        functional.cross_entropy(part, target, reduction="none")
        for part, target in zip(parts, wanted, strict=True)
    ]
    return torch.cat(losses).mean()


if __name__ == "__main__":
    main()
