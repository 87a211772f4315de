"""Runs out of memory in the forward or the backward pass, or catches it and tries a smaller batch."""

import sys

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(1024, 16384)
        self.narrow = torch.nn.Linear(16384, 1024)

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(x)))


def train(batch):
    x = torch.randn(batch, 1024, device="cuda")
    for block in blocks:
        x = block(x)
    x.square().mean().backward()


blocks = torch.nn.ModuleList(Block() for _ in range(4)).cuda()
if sys.argv[1] == "caught":
    for batch in (65536, 64):
        try:
            train(batch)
            break
        except torch.OutOfMemoryError:
            print("too large:", batch)
else:
    train(int(sys.argv[1]))
