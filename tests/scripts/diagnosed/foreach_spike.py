"""Many parameters and a small batch: the temporaries of the optimizer's step make the peak."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
