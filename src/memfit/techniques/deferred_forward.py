"""The forward of an output layer whose logits are computed on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.techniques.autocast_state import autocast_dtype
from memfit.techniques.deferred_logits import OutputLayer, defer
from memfit.techniques.replaced_forward import ReplacedForward

if TYPE_CHECKING:
    from memfit.techniques.chunked_cross_entropy import Backend


class DeferredForward(ReplacedForward):
    """Gives deferred logits wherever gradients are recorded; else, and under a compiler, the real ones."""

    def __init__(self, layer: nn.Module, chunks: int, backend: Backend = "torch") -> None:
        super().__init__(layer)
        self._chunks, self._backend = chunks, backend

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredForward, (self._module(), self._chunks, self._backend)

    def __call__(self, input: Tensor) -> Tensor:
        layer: Any = self._module()
        needed = input.requires_grad or layer.weight.requires_grad
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and needed) or input.dim() < 2:
            logits: Tensor = self.original()(input)
            return logits
        dtype = autocast_dtype(input.device.type) or input.dtype
        return defer(input, OutputLayer(layer.weight, layer.bias, dtype, self._chunks, self._backend))
