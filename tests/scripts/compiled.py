"""Trains a compiled model, with the default backend or the one that is named."""

import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda()
options = {"backend": sys.argv[1]} if len(sys.argv) > 1 else {}
compiled = torch.compile(model, **options) if sys.argv[1:] != ["none"] else model
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    compiled(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
