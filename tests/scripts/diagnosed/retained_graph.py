"""Backward passes that keep their graphs, and a meter that keeps the losses."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for _ in range(14):
    loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
    loss.backward(retain_graph=True)
    total = total + loss
    optimizer.step()
    optimizer.zero_grad()
