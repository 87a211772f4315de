"""Checkpointed layers that give their keys and values out to a cache, which keeps them."""

import torch
from torch.utils.checkpoint import checkpoint


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = torch.nn.Linear(512, 1024)
        self.values = torch.nn.Linear(512, 1024)
        self.out = torch.nn.Linear(1024, 512)

    def forward(self, x):
        keys, values = self.keys(x), self.values(x)
        return self.out(keys * values.sigmoid()), (keys, values)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(8)])

    def forward(self, x):
        cache = []
        for layer in self.layers:
            x, kept = checkpoint(layer, x, use_reentrant=False)
            cache.append(kept)
        return x, cache


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    output, cache = model(torch.randn(4096, 512, device="cuda"))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
