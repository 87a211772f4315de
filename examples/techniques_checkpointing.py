"""Gradient checkpointing on a small model: which blocks, what they keep, and how to take it back."""

from __future__ import annotations

import torch

import memfit

layers = [torch.nn.TransformerEncoderLayer(32, 4, batch_first=True) for _ in range(4)]
model = torch.nn.Sequential(*layers)
batch = torch.randn(2, 16, 32)


def gradients() -> list[torch.Tensor]:
    """The gradients of one step, from the same random state each time."""
    torch.manual_seed(0)
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


plain = gradients()

# Every second block is recomputed in the backward pass.
memfit.GradientCheckpointing(checkpoint_frequency=2).apply(model)
assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
memfit.undo(model)

# All blocks are recomputed, but each keeps the output of its last matrix product and what its dropouts drew.
memfit.GradientCheckpointing(save=["linear:3", "random"]).apply(model)
assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
memfit.undo(model)

# Chosen blocks, each with what it keeps: the form that plans have.
memfit.GradientCheckpointing(blocks={"0": [], "1": ["linear"]}).apply(model)
assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
memfit.undo(model)
