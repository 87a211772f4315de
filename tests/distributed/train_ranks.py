"""A small training run of several ranks, for tests: DDP or FSDP2, with faults on request.

    train_ranks.py CONFIG.json         the keys of `Config`, as a JSON object

Each rank appends ``step loss`` to ``out/losses-RANK.txt`` as it goes, so that what a killed rank computed is
known.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from memfit.distributed import DataOrder, FaultTolerance, groups, wrap


@dataclass(kw_only=True)
class Config:
    """What to train, and what goes wrong in it.

    ``faults`` are ``[kind, step]``, each happens once, to ``victim`` at the beginning of the step: ``kill``,
    ``kill_in_reduce`` (the other ranks stand in the all-reduce by then), ``hang``, ``out_of_memory``. With
    ``full_disk = [first, end]`` files of all ranks cannot grow beyond 1 KiB in those steps. A ``plain`` model
    has no dropout and no BatchNorm, and so computes the same on any number of ranks.
    """

    out: str
    steps: int = 12
    every: int = 4
    strategy: str = "ddp"
    faults: list[tuple[str, int]] = field(default_factory=list)
    victim: int = 1
    full_disk: tuple[int, int] | None = None
    hang_timeout: float | None = None
    plain: bool = False
    step_seconds: float = 0.0


class Model(nn.Module):
    """Two equal blocks, with dropout and BatchNorm: state in buffers and in the random generator."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        dropout = 0.0 if plain else 0.2
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8) if plain else nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


def main(config: Config) -> list[str]:
    """Train; the kinds of events that this rank saw."""
    torch.set_num_threads(1)
    groups.join()
    out, rank = Path(config.out), groups.rank()
    torch.manual_seed(3)
    data, wanted = torch.randn(64, 4), torch.randn(64, 1)
    model, optimizer = wrap(
        Model(config.plain), strategy=config.strategy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    torch.manual_seed(100 + rank)
    order = DataOrder(64, batch_size=12, seed=5)
    ft = FaultTolerance(
        config.every, folder=out / "checkpoints", keep_last=2, hang_timeout_seconds=config.hang_timeout
    )
    ft.protect(model, optimizer, scheduler=scheduler, data=order)
    with (out / f"losses-{rank}.txt").open("a", buffering=1) as losses:
        for step in ft.steps(config.steps):
            if config.full_disk and step in config.full_disk:
                ft.wait()  # the save before has room yet; the one that has none has failed by then
            provoke(config, step, rank)
            time.sleep(config.step_seconds)
            chosen = order.indices(step)
            loss = (model(data[chosen]) - wanted[chosen]).square().mean() * order.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.write(f"{step} {loss.item().hex()}\n")
    ft.close()
    return [event.kind for event in ft.events]


def provoke(config: Config, step: int, rank: int) -> None:
    """The fault that is due now, if any."""
    if config.full_disk and step in config.full_disk:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if step == config.full_disk[0] else most, most))
    for number, (kind, at) in enumerate(config.faults):
        happened = Path(config.out) / f"fault-{number}-happened"
        if rank == config.victim and step == at and not happened.exists():
            happened.touch()
            happen(kind)


def happen(kind: str) -> None:
    """One fault."""
    if kind == "kill_in_reduce":
        time.sleep(0.2)
    if kind.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "hang":
        time.sleep(3600)
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which "
        "1.00 GiB is free. Of the allocated memory 6.00 GiB is allocated by PyTorch, and 512.00 MiB is "
        "reserved by PyTorch but unallocated."
    )


if __name__ == "__main__":
    main(Config(**json.loads(Path(sys.argv[1]).read_text())))
    dist.destroy_process_group()
