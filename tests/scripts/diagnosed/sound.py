"""Training in which nothing is wrong."""

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(12):
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.inference_mode():
    for _ in range(3):
        model(torch.randn(512, 1024, device="cuda")).mean().item()
