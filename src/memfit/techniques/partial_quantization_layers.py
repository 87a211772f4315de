"""Quantized layers in the place of linear ones, and the way back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.techniques.base import Undo
from memfit.techniques.lora import _hand_over, _quantized_in_place


class Int8Linear(nn.Module):
    """A frozen linear layer whose weight is 8 bit with a scale for each row."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        self.register_buffer("codes", (weight / scale).round().clamp(-128, 127).to(torch.int8))
        self.register_buffer("scales", scale)
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """The weight is widened for the product, and again in the backward pass: it is not saved."""
        result: Tensor = _Int8Product.apply(x, self.codes, self.scales)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(x, (codes.to(scales.dtype) * scales).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        return gradient @ (codes.to(scales.dtype) * scales).to(gradient.dtype), None, None


def quantize_layers(
    root: nn.Module, layers: Mapping[str, Any], backend: str, optimizer: torch.optim.Optimizer | None
) -> Undo:
    """Puts them in; the plain weights wait in host memory until undo."""
    hosts: dict[str, Tensor] = {}
    devices = {name: layer.weight.device for name, layer in layers.items()}
    trained = {name: layer.weight.requires_grad for name, layer in layers.items()}
    for name, layer in layers.items():
        if backend == "bitsandbytes":
            hosts[name] = _quantized_in_place(root, name, layer)
        else:
            _put(root, name, Int8Linear(layer) if backend == "memfit" else _torchao_layer(layer))
            hosts[name] = layer.weight.data.to("cpu")
            layer.weight.data = hosts[name]
        layer.weight.grad = None
    optimizer_back = None if optimizer is None else _hand_over(optimizer, root)
    reference = weakref.ref(root)

    def undo() -> None:
        changed = reference()
        assert changed is not None, "a record outlived its model"
        for name, layer in layers.items():
            layer.weight.data = hosts[name].to(devices[name])
            layer.weight.requires_grad_(trained[name])
            _put(changed, name, layer)
        if optimizer_back is not None:
            optimizer_back()

    return undo


def _torchao_layer(layer: nn.Linear) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    copied = copy.deepcopy(layer).requires_grad_(False)
    quantize_(copied, Int8WeightOnlyConfig())
    return copied


def _put(root: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, layer)
