"""Inference without an optimizer: it runs to its end."""

import torch

with torch.inference_mode():
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    x = torch.randn(16, 1024, device="cuda")
    for _ in range(3):
        x = layer(x)
print("done", tuple(x.shape))
