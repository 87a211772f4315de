"""Training, then evaluation with gradients on, with a larger batch."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
correct = []
for _ in range(3):
    output = model(torch.randn(4096, 1024, device="cuda"))
    correct.append(output.mean().item())
