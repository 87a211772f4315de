"""Train on several ranks, survive the loss of one, and keep all of them in step.

    memfit launch --nproc 2 -- examples/distributed_training.py
    memfit launch --nproc 2 --restarts 1 -- examples/distributed_training.py --kill 30   # rank 1 kills itself

Both print the same last loss. Runs on GPUs (nccl) where there is one for each rank, else on the CPU (gloo).
Start it again, and it goes on from its last checkpoint: delete the folder to begin anew.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit.distributed import DataOrder, groups, wrap


def main(steps: int, folder: str, kill: int | None, strategy: str) -> None:
    groups.join()  # the process group that the launcher describes
    device, rank = groups.own_device(), groups.rank()
    torch.manual_seed(0)  # the same model on all ranks
    data = torch.randn(256, 16, device=device)
    wanted = data.square().mean(dim=1, keepdim=True)
    model, optimizer = wrap(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)),
        strategy=strategy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    torch.manual_seed(1 + rank)  # other dropout on each rank
    order = DataOrder(len(data), batch_size=32)
    tolerance = memfit.FaultTolerance(checkpoint_frequency=10, folder=folder, hang_timeout_seconds=60)
    sync = memfit.MemorySynchronization(sync_frequency=20)
    begun = tolerance.protect(model, optimizer, data=order)

    for step in tolerance.steps(steps):
        if step == kill and rank == 1 and begun == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        chosen = order.indices(step)
        loss = (model(data[chosen]) - wanted[chosen]).square().mean() * order.loss_weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = sync.step(model, optimizer, statistics={"loss": loss.item()})
        if found is not None and rank == 0:
            print(f"step {step + 1}: loss {found.statistics['loss'][0]:.6f}, {found.checked} tensors alike")
    tolerance.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default=str(Path("checkpoints-example")))
    parser.add_argument("--kill", type=int)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    given = parser.parse_args()
    main(given.steps, given.folder, given.kill, given.strategy)
