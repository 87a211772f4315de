"""Linear layers in four bits, as Lightning 2.1 to 2.3 and bitsandbytes 0.41 to 0.42 ran them.

Bitsandbytes of today keeps no input of a frozen layer for backward. That of 2023 and 2024 kept it, and in an
attribute, which backward does not free: it lives as long as anything that has the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

BLOCK = 64


class _OldMatMul4Bit(torch.autograd.Function):
    """``MatMul4Bit`` of bitsandbytes 0.41.1, autograd/_functions.py."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, state: Any) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        result = functional.linear(x, dequantize_4bit(packed, state).to(x.dtype), bias)
        ctx.state = state
        ctx.tensors = (x, packed) if ctx.needs_input_grad[0] else (None, None)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        from bitsandbytes.functional import dequantize_4bit

        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = dequantize_4bit(ctx.tensors[1], ctx.state).to(gradient.dtype)
        return torch.matmul(gradient, weight), None, None, None


class Linear4bit(nn.Module):
    """NF4 of a frozen weight.

    Args:
        before, after: sizes.
        bias: whether there is one; it stays as it is.
        double: whether the scales of blocks are quantized again.
    """

    def __init__(self, before: int, after: int, bias: bool, double: bool) -> None:
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        weight = torch.empty(after, before).half()  # Lightning's plugin quantizes from float16
        packed, self.state = quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=double, quant_type="nf4"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(after), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _OldMatMul4Bit.apply(x, self.weight, self.bias, self.state)
        return out
