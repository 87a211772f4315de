"""What a wrapped model holds, whole and by plain names, to compare with one process."""

from __future__ import annotations

import torch
from torch import nn


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients that there are, in host memory. Ranks that share a tensor call it together."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {_plain(name): _whole(grad) for name, grad in grads.items()}


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters, in host memory. Ranks that share a tensor call it together."""
    return {_plain(name): _whole(parameter) for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()
