"""Sequences of all lengths, the longest last."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in (700, 1100, 900, 1300, 1500, 1700, 2100, 2300, 2700, 3100):
    model(torch.randn(length, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
