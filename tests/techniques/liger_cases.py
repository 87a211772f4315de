"""Liger's backend of the chunked cross entropy against memfit's own chunks, on a device that is named.

As a script it runs in a process with TRITON_INTERPRET=1, on the CPU, and prints what differs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.techniques import ChunkedCrossEntropy

CLASSES, WIDTH, TOKENS = 97, 16, 26


def step(
    device: str, backend: str, dtype: torch.dtype, bias: bool, low: torch.dtype | None, **loss: object
) -> list[Tensor]:
    """Loss, and gradients after two backward passes through one graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias))
    model = model.to(device=device, dtype=dtype)
    ids = torch.arange(TOKENS, device=device) * 31 % CLASSES
    target = torch.where(ids % 5 == 0, -100, (ids * 7 + 3) % CLASSES)
    ChunkedCrossEntropy(layer="1", backend=backend, chunks=3).apply(model)
    with torch.autocast(device, dtype=low, enabled=low is not None):
        given = F.cross_entropy(model(ids), target, **loss)  # type: ignore[arg-type]
    total = (given * torch.linspace(1, 2, given.numel(), device=device).view_as(given)).sum()
    total.backward(retain_graph=True)
    total.backward()
    return [given.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def differences(device: str) -> Iterator[tuple[str, float]]:
    """Each case with the largest difference, relative to the largest value."""
    lows = (None, torch.bfloat16)
    losses = ({}, {"reduction": "sum"}, {"reduction": "none", "label_smoothing": 0.1})
    weighted = {"weight": torch.linspace(0, 1, CLASSES, device=device)}
    for bias, low, loss in itertools.product((False, True), lows, (*losses, weighted)):
        ours, theirs = (step(device, b, torch.float32, bias, low, **loss) for b in ("torch", "liger"))
        assert len(ours) == len(theirs)
        apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(ours, theirs, strict=True))
        yield f"bias={bias} autocast={low} {sorted(loss)}", apart / (1e-5 if low is None else 2e-2)


if __name__ == "__main__":
    json.dump([row for row in differences("cpu") if not row[1] <= 1], sys.stdout)
