"""Profiles a training loop: what memory is used for, and what piles up because of one forgotten detail.

    python examples/profile_training.py

The loop keeps each output for later: the profile shows memory that grows from step to
step, and the line that allocated what is kept.
"""

from __future__ import annotations

import torch
from torch import nn

from memfit import MemoryAnalyzer, MemoryProfiler

model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 16))
optimizer = torch.optim.AdamW(model.parameters())
outputs = []

profiler = MemoryProfiler(profiling_frequency=2, device="cpu")
profiler.start_profiling()
for _ in range(12):
    output = model(torch.randn(64, 256))
    output.square().mean().backward()
    outputs.append(output.detach())
    optimizer.step()
    optimizer.zero_grad()
profile = profiler.stop_profiling()

print(profiler.get_memory_usage())
leak = MemoryAnalyzer(profile).analyze().leak
assert leak is not None
print(f"\ngrows by {leak.bytes_per_step:.0f} bytes a step, allocated at {leak.sites[0].where}")
