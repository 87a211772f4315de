"""Two stages of a pipeline, of different size, that learn the shapes of what they pass on from each other."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 1024

if __name__ == "__main__":
    stage = int(os.environ["RANK"])
    torch.cuda.set_device(stage)
    device = torch.device("cuda", stage)
    dist.init_process_group("nccl", device_id=device)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(1 + stage))).to(device)
    known = ()
    if "known" in sys.argv:  # of one micro-batch
        known = (torch.empty(4, WIDTH, device="meta", requires_grad=stage > 0),)
        known += (torch.empty(4, WIDTH, device="meta", requires_grad=True),)
    part = PipelineStage(model, stage, 2, device, *known)
    schedule = Schedule1F1B(part, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(16, WIDTH, device=device)
    for _ in range(2):
        schedule.step(data) if stage == 0 else schedule.step(target=data, losses=[])
        optimizer.step()
        optimizer.zero_grad()
