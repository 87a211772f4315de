"""Operations whose answer on the made-up GPU is a decision: reads, finiteness checks, sizes that depend on
data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.dryrun.collective_values import collectives
from memfit.dryrun.devices import last_upload
from memfit.dryrun.shadow import (
    FLOATS,
    MISSING,
    Asks,
    Special,
    TrueValues,
    device_tensors,
    tell,
    tensors,
    touches_device,
)
from memfit.dryrun.sizes import asked_size, sized

aten = torch.ops.aten


def true_values(questions: Asks) -> TrueValues:
    """The shadows of a process, with the decisions of this file."""
    return TrueValues(questions, SPECIAL)


def _read_scalar(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.item()``, ``bool()``, ``float()``: the true value, or one that is finite, positive and false."""
    tensor = args[0]
    if not tensor.is_cuda:
        return MISSING
    shadow = values.shadow(tensor)
    if shadow is not None:
        known = shadow.item()
        tell(values.origins(tensor), repr(known))
        return known
    answer: Any
    if tensor.dtype is torch.bool:
        question = values.ask(func, "boolean")
        answer = question.boolean(False)
    elif tensor.is_floating_point() or tensor.is_complex():
        question = values.ask(func, "number")
        answer = question.number()
    else:
        question = values.ask(func, "whole")
        answer = question.whole()
    question.told(repr(answer))
    return complex(answer) if tensor.is_complex() else answer


def _compare_all(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations that answer a Python boolean for whole tensors (`torch.equal`)."""
    if not touches_device(args, kwargs):
        return MISSING
    out = func(*args, **kwargs)
    true = values.on_cpu(func, args, kwargs)
    if true is MISSING:
        question = values.ask(func, "boolean")
        answer = question.boolean(out)
        question.told(repr(answer))
        return answer
    tell(values.origins(args, kwargs), repr(true))
    return true


def _assume(answer: bool) -> Special:
    """A check of unknown floats: they count as finite numbers that equal no constant, zero included."""

    def check(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not tensor.is_cuda or tensor.dtype not in FLOATS or values.shadow(tensor) is not None:
            return MISSING
        out = func(*args, **kwargs)
        question = values.ask(func, "check")
        values.learn_uniform(out, question.boolean(answer), frozenset({question}))
        return out

    return check


def _assume_if(applies: Callable[[Any, Any], bool], answer: bool) -> Special:
    """`_assume` for a comparison that is a check of finiteness only with certain arguments."""
    assume = _assume(answer)

    def check(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return assume(values, func, args, kwargs) if applies(args[0], args[1]) else MISSING

    return check


def _with_itself(first: Any, second: Any) -> bool:
    return first is second


def _unscale(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient scaler's check: no gradient is infinite, so the optimizer steps."""
    found_inf = args[1]
    out = func(*args, **kwargs)
    if found_inf.is_cuda:
        question = values.ask(func, "overflow")
        values.learn_uniform(found_inf, float(question.boolean(False)), frozenset({question}))
    return out


def _fill_new(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of one value is known whatever its size, if it holds integers or booleans."""
    out = func(*args, **kwargs)
    if type(out) is torch.Tensor and out.is_cuda:
        if out.dtype not in FLOATS:
            values.learn_uniform(out, _FILLS[func](args))
        elif values.keeps(out):
            values.learn_uniform(out, float(_FILLS[func](args)))
    return out


def _sum(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many there are of what is nowhere: none."""
    if not values.has_uniform or not args[0].is_cuda or values.uniform(args[0]) not in (False, 0):
        return MISSING
    out = func(*args, **kwargs)
    values.learn_uniform(out, 0, values.origins(args[0]))
    return out


def _uniform_result(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Logic on large tensors that hold one value throughout gives one value throughout."""
    if not values.has_uniform:
        return MISSING
    inputs = device_tensors(args)
    known = [values.uniform(tensor) for tensor in inputs]
    if not inputs or any(value is MISSING for value in known):
        return MISSING
    small = iter(
        [
            torch.full((1,) * tensor.dim(), value, dtype=tensor.dtype, device="cpu")
            for tensor, value in zip(inputs, known, strict=True)
        ]
    )
    out = func(*args, **kwargs)
    if type(out) is torch.Tensor and out.is_cuda:
        true = func(
            *[next(small) if isinstance(x, torch.Tensor) and x.is_cuda else x for x in args], **kwargs
        )
        values.learn_uniform(out, true.flatten()[0].item(), values.origins(args))
    return out


def _absorb(absorbing: bool) -> Special:
    """``true or unknown`` is true, ``false and unknown`` is false: loops end that end at a known length."""

    def combine(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = device_tensors(args)
        if len(inputs) == 2 and not all(values.keeps(tensor) for tensor in inputs):
            return _uniform_result(values, func, args, kwargs)
        known = [(tensor, values.shadow(tensor)) for tensor in inputs]
        if len(known) != 2 or sum(shadow is None for _, shadow in known) != 1:
            return _uniform_result(values, func, args, kwargs)
        (tensor, shadow) = next((tensor, shadow) for tensor, shadow in known if shadow is not None)
        if absorbing and any(one.dtype is not torch.bool for one in inputs):
            return MISSING
        if not (bool(shadow.all()) if absorbing else not bool(shadow.any())):
            return MISSING
        out = func(*args, **kwargs)
        if out.shape == torch.broadcast_shapes(tensor.shape, out.shape):
            values.learn_uniform(out, absorbing, values.origins(tensor))
        return out

    return combine


def _select_known(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes that depend on data (`nonzero`, `unique`): those of the true values where they are known."""
    if not touches_device(args, kwargs):
        return MISSING
    out = func(*args, **kwargs)  # its temporaries are what the device would have
    true = values.on_cpu(func, args, kwargs)
    if true is MISSING:
        return sized(values, func, args, out)
    origins = values.origins(args, kwargs)
    tell(origins, f"size {_first_size(true)}")
    device = next(iter(tensors(out))).device
    moved = [value.to(device) for value in tensors(true)]
    for tensor, value in zip(moved, tensors(true), strict=True):
        if values.keeps(tensor):
            values.learn(tensor, value, origins)
    return moved[0] if isinstance(out, torch.Tensor) else type(out)(moved)


def _select_masked(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`masked_select`: the size needs the mask alone."""
    tensor, mask = args[0], args[1]
    if not mask.is_cuda:
        return MISSING
    shadow = values.shadow(mask)
    if shadow is not None and values.shadow(tensor) is not None:
        return _select_known(values, func, args, kwargs)
    out = func(*args, **kwargs)
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    if shadow is None:
        return out.new_empty(asked_size(values, func, mask, shape.numel()))
    count = int(shadow.expand(shape).sum())
    tell(values.origins(mask), f"size {count}")
    return out.new_empty(count)


def _index(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by a boolean mask: by the positions that the true mask has."""
    masks = [x for x in args[1] if x is not None and x.is_cuda and x.dtype in (torch.bool, torch.uint8)]
    if not masks or _fills_by_mask(args):
        return MISSING
    indices: list[Any] = []
    for index in args[1]:
        if any(index is mask for mask in masks):
            indices += _positions(values, index)
        else:
            indices.append(index)
    return values.call(func, (args[0], indices, *args[2:]), kwargs)


def _fills_by_mask(args: tuple[Any, ...]) -> bool:
    """``x[mask] = 1``: PyTorch fills under the mask, and needs no positions, if it is the only index."""
    value = args[2] if len(args) > 2 else None
    alone = sum(index is not None for index in args[1]) == 1
    return alone and isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cuda


def _positions(values: TrueValues, mask: torch.Tensor) -> list[torch.Tensor]:
    """The coordinates where ``mask`` is true, on the device, as the kernel would get them from `nonzero`."""
    found = values.call(aten.nonzero.default, (mask,), {})
    return list(found.unbind(1))


def _route(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The best few of each row of unknown numbers, as routers of experts choose them: evenly spread."""
    scores = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not scores.is_cuda or scores.dtype not in FLOATS or values.shadow(scores) is not None:
        return MISSING
    if scores.dim() < 2 or dim not in (-1, scores.dim() - 1) or scores.shape[-1] > _MOST_EXPERTS:
        return MISSING
    out = func(*args, **kwargs)
    chosen = out[1]
    if values.keeps(chosen):
        question = values.ask(func, "routing")
        values.learn(chosen, _spread(chosen, scores.shape[-1], question.is_expected), frozenset({question}))
    return out


def _spread(chosen: torch.Tensor, experts: int, evenly: bool) -> torch.Tensor:
    """Which expert each row goes to: in turns, or all rows to the first ones."""
    count = chosen.shape[-1]
    rows = torch.arange(chosen.numel() // max(count, 1), device="cpu") * (count if evenly else 0)
    return ((rows[:, None] + torch.arange(count, device="cpu")) % experts).reshape(chosen.shape)


def _lift(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor made of Python numbers: what it holds was copied to the device just before."""
    out = func(*args, **kwargs)
    if type(out) is torch.Tensor and out.is_cuda and values.keeps(out) and out.is_contiguous():
        content = last_upload(out.data_ptr(), out.numel() * out.element_size())
        if content:
            values.learn(out, torch.frombuffer(bytearray(content), dtype=out.dtype).reshape(out.shape))
    return out


def _mode(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mode`: the kernel for long rows looks for what it sorted and fails; by then it has allocated all."""
    scores = args[0]
    if not scores.is_cuda:
        return MISSING
    try:
        out = func(*args, **kwargs)
    except RuntimeError as error:
        if "position_iter" not in str(error):
            raise
        meta = func(scores.to("meta"), *args[1:], **kwargs)
        out = tuple(torch.empty_like(part, device=scores.device) for part in meta)
    values.follow(func, args, kwargs, out)
    return out


def _unchecked(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`segment_reduce`: lengths that are on the device are not there to be checked."""
    out = func(*args, **{**kwargs, "unsafe": kwargs.get("unsafe") or args[0].is_cuda})
    values.follow(func, args, kwargs, out)
    return out


def _first_size(out: Any) -> int:
    first = next(iter(tensors(out)), None)
    return 0 if first is None or first.dim() == 0 else first.shape[0]


def _overloads(*packets: Any) -> list[Any]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


_FILLS: Mapping[Any, Callable[[tuple[Any, ...]], Any]] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda args: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda args: 1),
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), lambda args: args[1]),
}
_FILLS = {**_FILLS, aten.new_full.default: lambda args: args[2]}
_DYNAMIC = [
    aten.nonzero.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
]
_MOST_EXPERTS = 1024  # more choices are words of a vocabulary
_LOGIC = _overloads(
    aten.any, aten.all, aten.logical_not, aten.bitwise_not, aten.logical_or, aten.logical_and, aten.mul,
    aten.bitwise_or, aten.bitwise_and, aten.clone, aten.max, aten.min, aten.amax, aten.amin,
)  # fmt: skip

_OR = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.logical_or_.default, aten.bitwise_or_.Tensor)
_AND = (
    aten.logical_and.default,
    aten.bitwise_and.Tensor,
    aten.logical_and_.default,
    aten.bitwise_and_.Tensor,
)

SPECIAL: Mapping[Any, Special] = {
    **dict.fromkeys(_LOGIC, _uniform_result),
    **dict.fromkeys(_OR, _absorb(True)),
    **dict.fromkeys(_AND, _absorb(False)),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default), _sum),
    **dict.fromkeys(_FILLS, _fill_new),
    **dict.fromkeys(_DYNAMIC, _select_known),
    **collectives(),
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default, aten.index_put_.default), _index),
    **dict.fromkeys((aten._index_put_impl_.default, aten._unsafe_index_put.default), _index),
    aten.masked_select.default: _select_masked,
    aten.topk.default: _route,
    aten.mode.default: _mode,
    aten.segment_reduce.default: _unchecked,
    aten.lift_fresh.default: _lift,
    aten._local_scalar_dense.default: _read_scalar,
    aten.equal.default: _compare_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.isnan.default: _assume(False),
    aten.isinf.default: _assume(False),
    aten.isposinf.default: _assume(False),
    aten.isneginf.default: _assume(False),
    aten.eq.Tensor: _assume_if(_with_itself, True),
    aten.ne.Tensor: _assume_if(_with_itself, False),
    aten.eq.Scalar: _assume(False),
    aten.ne.Scalar: _assume(True),
}
"""The operations that are not simply repeated on the shadows."""
