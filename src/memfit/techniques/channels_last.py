"""Convolution weights in the order in which tensor cores read them: channels last.

The numbers stay; only their order in memory changes (NHWC in place of NCHW). Kernels follow their inputs'
layout, so weights in that order make a network run so from its first convolution on, without transposes in
between. Source: PyTorch's channels-last tutorial; cuDNN's tensor core kernels take NHWC.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Technique):
    """Lays the weights of convolutions out channels last, with the optimizer's state for them.

    Examples:
        >>> import torch
        >>> model = ChannelsLast().apply(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)))
        >>> model(torch.zeros(1, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
        True
    """

    name: ClassVar[str] = "channels_last"

    def exactness(self, model: nn.Module) -> Exactness:
        return "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Nothing in bytes: it is for speed. On a GPU it spares the transposed copies that cuDNN makes."""
        from memfit.techniques.saving import Saving

        convolves = any("convolution" in op.name for op in graph.ops)
        note = "for speed: sizes stay" if convolves else "this step has no convolution"
        return Saving(peak_bytes=0, note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from torch.nn.parallel import DataParallel, DistributedDataParallel

        refuse_second(model, ChannelsLast)
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise UsageError(
                f"{self.name}: {type(model).__name__} has laid its gradients out already; wrap it later"
            )
        weights = _convolution_weights(bare_model(model))
        if not weights:
            raise UsageError(
                f"{self.name}: this {type(bare_model(model)).__name__} has no 2-d or 3-d convolution"
            )
        strides = [(weakref.ref(weight), weight.stride()) for weight in weights]
        for weight in weights:
            _lay_out(weight, _last(weight), optimizer)
        reference = None if optimizer is None else weakref.ref(optimizer)

        def undo() -> None:
            for alive, stride in strides:
                weight = alive()
                if weight is not None:
                    _lay_out(weight, stride, None if reference is None else reference())

        return undo


def _convolution_weights(root: nn.Module) -> list[nn.Parameter]:
    from torch import nn

    kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    found = [m.weight for m in root.modules() if isinstance(m, kinds)]
    return [w for w in {id(w): w for w in found}.values() if isinstance(w, nn.Parameter)]


def _last(weight: Tensor) -> tuple[int, ...]:
    """The strides of this shape with its channels last."""
    import torch

    form = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return torch.empty(weight.shape, device="meta", memory_format=form).stride()


def _lay_out(weight: Any, stride: tuple[int, ...], optimizer: Optimizer | None) -> None:
    """The same numbers with these strides: in the weight, its gradient and its state."""
    weight.data = _with_strides(weight.data, stride)
    if weight.grad is not None:
        weight.grad.data = _with_strides(weight.grad.data, stride)
    state = {} if optimizer is None else optimizer.state.get(weight, {})
    for key, value in state.items():
        if getattr(value, "shape", None) == weight.shape:
            state[key] = _with_strides(value, stride)


def _with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    if tensor.stride() == tuple(stride):
        return tensor
    made = tensor.new_empty_strided(tensor.shape, stride)
    return made.copy_(tensor)
