"""One rank of data-parallel training, as torchrun starts it."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(32, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("rank", dist.get_rank(), "of", dist.get_world_size())
