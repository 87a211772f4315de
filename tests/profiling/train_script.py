"""A training script: STEPS [--cuda] [--fail]."""

import sys

import torch
from torch import nn

torch.set_default_device("cuda" if "--cuda" in sys.argv else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 16))
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(int(sys.argv[1])):
    loss = model(torch.randn(128, 256)).square().mean()
    losses.append(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if "--fail" in sys.argv:
    1 / 0  # noqa: B018
print("losses", len(losses))
