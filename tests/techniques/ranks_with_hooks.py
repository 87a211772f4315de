"""What each of two processes runs: the same step plain and with each gradient hook."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memfit.techniques.compression import MemoryCompression

STEPS = 12
METHODS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {},
    "topk": {"share": 0.1},
    "powersgd": {"rank": 4, "start_step": 2},
}


def exchange(rank: int, folder: str) -> None:
    """Writes what the methods gave to ``figures.json``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    batch = torch.randn(16, 64)
    plain = _gradients(batch, None)
    figures = {}
    for method, settings in METHODS.items():
        torch.manual_seed(0)
        model = _model()
        hook = MemoryCompression().compress_gradients(model, method, **settings)
        found = _gradients(batch, model)
        others = [torch.empty_like(found[0]) for _ in range(2)]
        dist.all_gather(others, found[-1])
        figures[method] = {
            "ratio": hook.ratio,
            "error": _error(found[-1], plain[-1]),
            "first_error": _error(found[0], plain[0]),
            "sum_error": _error(sum(found), sum(plain)),  # type: ignore[arg-type]
            "same_on_all_ranks": bool(torch.equal(*others)),
        }
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a fork must not run what the test process does at its end


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 50, bias=False))
    )


def _gradients(batch: Tensor, model: nn.Module | None) -> list[Tensor]:
    """Of several steps that change nothing: one vector each."""
    model = _model() if model is None else model
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        model(batch).square().mean().backward()
        found.append(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]))
    return found


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
