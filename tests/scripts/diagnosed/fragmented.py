"""Buffers of 3 MiB share segments of 20 MiB; every sixth stays, and a larger request finds no hole."""

import torch

buffers = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(1000)]
buffers = buffers[::6]
batch = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
