"""Liger-Kernel's fused linear layer and cross entropy: the chunks' losses and gradients by one Triton kernel.

The kernel overwrites a chunk's logits with their gradient while they are in registers. Losses and gradients
are taken per row and unscaled, so what is done with them (reduction, scale of the loss, a second backward
pass) is ``linear_cross_entropy``'s own code for every backend.
Source: Hsu et al., "Liger Kernel" (2024), https://arxiv.org/abs/2410.10989.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.core.errors import CannotRunHere, UsageError

if TYPE_CHECKING:
    from memfit.techniques.linear_cross_entropy import LossTerms

_NEEDED = ("compute_gradients", "weight_requires_grad", "token_grad_output")
_INSTALL = "pip install 'memfit[kernels]'"


def check_liger(name: str, layer: nn.Module) -> None:
    """Whether the kernel can compute this output layer's loss.

    Raises:
        CannotRunHere: no CUDA device holds the layer, or no liger-kernel that fits is installed.
        UsageError: the layer is in float64.
    """
    weight: Any = layer.weight
    if not _runs_on(weight.device):
        raise CannotRunHere(
            f"chunked_cross_entropy(backend='liger') runs Triton kernels on CUDA, and the output layer "
            f"{name!r} is on {weight.device.type!r}; move the model first, or take backend='torch', which "
            "runs everywhere"
        )
    if weight.dtype == torch.float64:
        raise UsageError(
            f"chunked_cross_entropy(backend='liger') computes in float32, and {name!r} is float64; take "
            "backend='torch'"
        )
    _kernel()


def rows_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    terms: LossTerms,
    row_scale: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Each row's loss, and the gradients of the sum of the rows' losses.

    Args:
        row_scale: what each row counts in that sum.
        wanted: which gradients: those of ``hidden``, ``weight``, ``bias``.

    Returns:
        losses in float32; gradients in their tensors' own types, None where none is wanted.
    """
    low = terms.compute_dtype != weight.dtype
    with torch.autocast(hidden.device.type, dtype=terms.compute_dtype if low else None, enabled=low):
        losses, _, _, _, of_hidden, of_weight, of_bias = _kernel()(
            hidden if low else hidden.to(weight.dtype),
            weight,
            target,
            bias=bias,
            ignore_index=terms.ignore_index,
            label_smoothing=terms.label_smoothing,
            reduction="none",
            token_grad_output=row_scale,
            compute_gradients=any(wanted),
            weight_requires_grad=wanted[1],
        )
    return (
        losses,
        of_hidden.to(hidden.dtype) if wanted[0] else None,
        of_weight if wanted[1] else None,
        of_bias if wanted[2] else None,
    )


def _kernel() -> Callable[..., Any]:
    if importlib.util.find_spec("liger_kernel") is None:
        raise CannotRunHere(f"backend='liger' needs liger-kernel, which is not installed: {_INSTALL}")
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    kernel: Callable[..., Any] = module.fused_linear_cross_entropy_forward
    known = inspect.signature(kernel).parameters
    if not all(name in known for name in _NEEDED):
        raise CannotRunHere(f"backend='liger' needs liger-kernel 0.8.5 or later: {_INSTALL} --upgrade")
    return kernel


def _runs_on(device: torch.device) -> bool:
    """On CUDA; anywhere where Triton interprets its kernels."""
    return device.type == "cuda" or (os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu")
