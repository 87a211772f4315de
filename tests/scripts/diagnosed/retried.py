"""A smaller batch is tried while the exception of the larger one is still being handled."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(30)]).cuda()


def step(rows):
    x = model(torch.randn(rows, 1024, device="cuda"))
    loss = x.square().mean()
    loss.backward()
    model.zero_grad()


try:
    step(40_000)
except torch.OutOfMemoryError:
    step(500)
