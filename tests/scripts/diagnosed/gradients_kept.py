"""Gradients are set to zero, not let go of, and the peak is in the forward pass."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.no_grad():
        teacher = model(torch.randn(16_384, 2048, device="cuda")).mean()
    loss = model(torch.randn(64, 2048, device="cuda")).square().mean() + teacher
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
