"""Results whose size depends on values that are not known: as large as may be expected."""

from __future__ import annotations

from typing import Any

import torch

from memfit.dryrun.shadow import FLOATS, TrueValues, tensors

aten = torch.ops.aten


def asked_size(values: TrueValues, func: Any, mask: torch.Tensor, most: int) -> int:
    """How many of at most ``most`` elements count by ``mask``: half of them, if they are flags; all numbers
    count as other than zero."""
    question = values.ask_size(func, mask)
    expected = most if mask.dtype in FLOATS else -(-most // 2)
    size = question.size(expected=expected, most=most)
    question.told(f"size {size} of {most}")
    return size


def sized(values: TrueValues, func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """``out``, the result of an operation on unknown values, made as large as its question is answered.

    `nonzero` and indexing by a mask take half of the flags and all numbers, `unique` finds all to be
    different; other operations keep the size that they have for zeros.
    """
    source = args[0]
    if func is aten.nonzero.default:
        count = asked_size(values, func, source, source.numel())
        return out.new_empty((count, source.dim()))
    if func in (aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default):
        return _all_different(values, func, args, out)
    first = next(iter(tensors(out)), None)
    size = 0 if first is None or first.dim() == 0 else first.shape[0]
    values.ask(func, "size").told(f"size {size}")
    return out


def _all_different(values: TrueValues, func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """What `unique` gives: the values, where each element went, and how many there are of each."""
    source = args[0]
    dim = args[1] if func is aten.unique_dim.default else None
    most = source.numel() if dim is None else source.shape[dim]
    question = values.ask_size(func, source)
    size = question.size(expected=most, most=most, least=min(1, most))
    question.told(f"size {size} of {most}")
    shape = [size] if dim is None else [*source.shape]
    if dim is not None:
        shape[dim] = size
    distinct, inverse, counts = out
    return (distinct.new_empty(shape), inverse, counts.new_empty([size]) if counts.numel() else counts)
