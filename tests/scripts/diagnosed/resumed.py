"""Training that goes on from a checkpoint, which is loaded to the GPU and stays there."""

import os
import tempfile

import torch


def build():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).cuda()


folder = tempfile.mkdtemp()
path = os.path.join(folder, "last.pt")
first = build()
torch.save({"model": first.state_dict(), "step": 3}, path)
del first

model = build()
checkpoint = torch.load(path)
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(checkpoint["step"]):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
