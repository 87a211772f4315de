"""Objects that hold each other, and tensors: they wait for Python's garbage collector."""

import gc

import torch


class Batch:
    def __init__(self):
        self.x = torch.randn(1024, 1024, device="cuda")
        self.owner = self


gc.disable()
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    model(Batch().x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        gc.collect()
