"""Logits that are not computed until something looks at them.

``DeferredLogits`` stands for ``linear(hidden, weight, bias)``. Changes of its leading dimensions, slices,
and casts to float are done on ``hidden``; ``cross_entropy`` on it runs chunk by chunk (see
``linear_cross_entropy``). Everything else computes the real logits first and goes on with them, so any loss
is right, only not smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.techniques.autocast_state import autocast_dtype, without_autocast
from memfit.techniques.linear_cross_entropy import LossTerms, linear_cross_entropy


@dataclass(frozen=True)
class OutputLayer:
    """The layer that the logits come from, and the precision that it was called in."""

    weight: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    chunks: int
    backend: Literal["torch", "liger"] = "torch"

    def logits(self, hidden: Tensor) -> Tensor:
        """What the layer itself gives."""
        with without_autocast(hidden.device.type):
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            return F.linear(hidden.to(self.compute_dtype), self.weight.to(self.compute_dtype), bias)


class DeferredLogits(Tensor):
    """A tensor with shape, type and device of the logits, but without their memory. Made by ``defer``."""

    layer: OutputLayer
    hidden: Tensor
    vocabulary_at: int
    real_of: Callable[[], Tensor]
    known: list[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if (
            handler is not None
            and isinstance(args[0] if args else None, DeferredLogits)
            and not args[0].is_real()
        ):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_real(args), **_real(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Code that goes round __torch_function__ (a custom autograd function): the values are computed here,
        # and the gradient comes back through _Carrier.
        return func(*_values(args), **_values(kwargs or {}))

    def is_real(self) -> bool:
        """Whether the logits, or those that this is a view of, have been computed (and maybe changed in
        place)."""
        parent = getattr(self, "parent", None)
        return bool(self.known) or (parent is not None and parent.is_real())

    def materialized(self) -> Tensor:
        """The logits themselves; computed once. A view's are a view of the first ones', so that they share
        memory."""
        if not self.known:
            with torch.enable_grad():
                self.known.append(self.real_of())
        return self.known[0]


def defer(hidden: Tensor, layer: OutputLayer) -> DeferredLogits:
    """Stands for ``linear(hidden, layer.weight, layer.bias)``."""
    return _make(hidden, layer, layer.compute_dtype, hidden.dim() - 1, lambda: layer.logits(hidden), None)


def _make(
    hidden: Tensor,
    layer: OutputLayer,
    dtype: torch.dtype,
    vocabulary_at: int,
    real_of: Callable[[], Tensor],
    parent: DeferredLogits | None,
) -> DeferredLogits:
    logits: DeferredLogits = _Carrier.apply(hidden, layer.weight, layer.bias, layer, dtype, vocabulary_at)
    logits.layer, logits.hidden, logits.vocabulary_at = layer, hidden, vocabulary_at
    logits.real_of, logits.known, logits.parent = real_of, [], parent  # type: ignore[attr-defined]
    return logits


class _Carrier(torch.autograd.Function):
    """Gives the stand-in its place in the graph: a gradient of the logits goes on to the layer's inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: OutputLayer,
        dtype: torch.dtype,
        vocabulary_at: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.vocabulary_at, ctx.dtype, ctx.bias_dtype = (
            vocabulary_at,
            layer.compute_dtype,
            bias if bias is None else bias.dtype,
        )
        shape = [*hidden.shape[:-1]]
        shape.insert(vocabulary_at, weight.shape[0])
        made: Tensor = Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        slope = grad.movedim(ctx.vocabulary_at, -1).flatten(0, -2).to(ctx.dtype)
        rows = hidden.flatten(0, -2).to(ctx.dtype)
        wants = ctx.needs_input_grad
        of_hidden = (slope @ weight.to(ctx.dtype)).view_as(hidden).to(hidden.dtype) if wants[0] else None
        of_weight = (slope.T @ rows).to(weight.dtype) if wants[1] else None
        of_bias = slope.sum(0).to(ctx.bias_dtype) if wants[2] else None
        return of_hidden, of_weight, of_bias, None, None, None


def _derived(
    logits: DeferredLogits,
    replay: Callable[[Tensor], Tensor],
    *,
    hidden: Tensor | None = None,
    dtype: torch.dtype | None = None,
    vocabulary_at: int | None = None,
) -> DeferredLogits:
    moved = logits.hidden if hidden is None else hidden
    at = moved.dim() - 1 if vocabulary_at is None else vocabulary_at
    return _make(
        moved, logits.layer, dtype or logits.dtype, at, lambda: replay(logits.materialized()), logits
    )


def _is_last(logits: DeferredLogits) -> bool:
    return logits.vocabulary_at == logits.dim() - 1


def _reshape(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes) or not _is_last(logits):
        return NotImplemented
    sizes = list(sizes)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = logits.numel() // rest if rest else -1
    if sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    hidden = logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1])
    return _derived(logits, lambda real: real.reshape(sizes), hidden=hidden)


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = end_dim % logits.dim()
    if not _is_last(logits) or last == logits.dim() - 1:
        return NotImplemented
    hidden = logits.hidden.flatten(start_dim, last)
    return _derived(logits, lambda real: real.flatten(start_dim, last), hidden=hidden)


def _index(logits: DeferredLogits, index: Any) -> Any:
    """Indexing that leaves the vocabulary whole does the same to the hidden rows."""
    if not _is_last(logits) or not _keeps_last(index if isinstance(index, tuple) else (index,), logits.dim()):
        return NotImplemented
    return _derived(logits, lambda real: real[index], hidden=logits.hidden[index])


def _keeps_last(index: tuple[Any, ...], dims: int) -> bool:
    if any(item is True or item is False for item in index):
        return False
    used = sum(_dims_used(item) for item in index)
    reaches_last = any(item is Ellipsis for item in index) and index[-1] is not Ellipsis or used == dims
    return used <= dims and (not reaches_last or (isinstance(index[-1], slice) and index[-1] == slice(None)))


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _transpose(logits: DeferredLogits, dim0: int, dim1: int) -> Any:
    order = list(range(logits.dim()))
    first, second = dim0 % logits.dim(), dim1 % logits.dim()
    order[first], order[second] = order[second], order[first]
    return _permute(logits, *order)


def _permute(logits: DeferredLogits, *order: Any) -> Any:
    axes = list(order[0]) if len(order) == 1 and isinstance(order[0], (tuple, list)) else list(order)
    axes = [axis % logits.dim() for axis in axes]
    last = logits.dim() - 1
    if not _is_last(logits) or sorted(axes) != list(range(logits.dim())):
        return NotImplemented
    hidden = logits.hidden.permute(*[axis for axis in axes if axis != last], last)
    return _derived(logits, lambda real: real.permute(axes), hidden=hidden, vocabulary_at=axes.index(last))


def _contiguous(logits: DeferredLogits, memory_format: Any = torch.contiguous_format) -> Any:
    if memory_format is not torch.contiguous_format:
        return NotImplemented
    return _derived(logits, lambda real: real.contiguous(), vocabulary_at=logits.vocabulary_at)


def _float(logits: DeferredLogits, memory_format: Any = torch.preserve_format) -> Any:
    return _cast(logits, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    wanted = [*args, *kwargs.values()]
    if len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        return _cast(logits, wanted[0])
    same = len(wanted) == 1 and isinstance(wanted[0], (str, torch.device))
    return logits if same and torch.device(wanted[0]) == logits.device else NotImplemented


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    """A cast to a wider type: the loss is computed in float32 or wider anyway."""
    if dtype == logits.dtype:
        return logits
    if dtype not in (torch.float32, torch.float64) or logits.dtype == torch.float64:
        return NotImplemented
    if dtype == torch.float64:
        return NotImplemented
    return _derived(logits, lambda real: real.float(), dtype=dtype, vocabulary_at=logits.vocabulary_at)


def _cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes_at_one = logits.dim() >= 2 and logits.vocabulary_at == 1
    if not classes_at_one or target.is_floating_point() or target.shape != logits.hidden.shape[:-1]:
        return NotImplemented
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    layer, dtype = logits.layer, logits.dtype
    terms = LossTerms(
        compute_dtype=layer.compute_dtype,
        chunks=layer.chunks,
        backend=layer.backend if weight is None else "torch",
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    loss = linear_cross_entropy(
        logits.hidden.flatten(0, -2),
        layer.weight,
        layer.bias,
        target.flatten(),
        terms=terms,
        class_weight=weight,
    )
    loss = loss.to(dtype) if autocast_dtype(logits.device.type) is None else loss
    return loss.view_as(target) if reduction == "none" else loss


def _real(value: Any) -> Any:
    return _replaced(value, lambda logits: logits.materialized())


def _values(value: Any) -> Any:
    return _replaced(value, lambda logits: logits.materialized().detach())


def _replaced(value: Any, change: Callable[[DeferredLogits], Tensor]) -> Any:
    if isinstance(value, DeferredLogits):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(inner, change) for inner in value)
    return {key: _replaced(inner, change) for key, inner in value.items()} if type(value) is dict else value


_METADATA = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
        Tensor.get_device,
        torch.numel,
        torch.is_floating_point,
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "layout",
                "is_cuda",
                "requires_grad",
                "grad_fn",
                "is_leaf",
            )
        ),
    }
)
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.contiguous: _contiguous,
    Tensor.float: _float,
    Tensor.to: _to,
    F.cross_entropy: _cross_entropy,
}
