"""Triton kernels that pack tensors into int8 and int4 groups and back, one pass over memory each.

The same bits as the torch code in ``codecs.int8`` and ``codecs.int4``. Three rules keep it so, also in
Triton's interpreter: values are widened to float32 as they are loaded, rounded by hand (to the next integer
by adding and subtracting 1.5 · 2²³, to bfloat16 by integer arithmetic), and products are not fused with sums.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: PLR0124  (a NaN is what differs from itself)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memfit.techniques.codecs.base import Parts
from memfit.techniques.codecs.groups import GROUP, group_count

GROUPS_PER_PROGRAM = 32
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def pack_int8(flat: Tensor) -> Parts:
    """The parts of ``CODECS["int8"].encode``."""
    groups = group_count(flat.numel())
    codes = torch.empty(flat.numel(), dtype=torch.int8, device=flat.device)
    scales = torch.empty(groups, dtype=torch.float32, device=flat.device)
    _launch(_pack_int8, groups, _words(flat), codes, scales, flat.numel(), KIND=_KINDS[flat.dtype])
    return codes, scales


def unpack_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``CODECS["int8"].decode`` gives."""
    out = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
    numel = codes.numel()
    _launch(_unpack_int8, scales.numel(), codes, scales, _words(out), numel, KIND=_KINDS[dtype])
    return out


def pack_int4(flat: Tensor) -> Parts:
    """The parts of ``CODECS["int4"].encode``."""
    groups, numel = group_count(flat.numel()), flat.numel()
    codes = torch.empty(-(-numel // 2), dtype=torch.uint8, device=flat.device)
    scales = torch.empty(2 * groups, dtype=torch.float32, device=flat.device)
    _launch(_pack_int4, groups, _words(flat), codes, scales, numel, KIND=_KINDS[flat.dtype])
    return codes, scales


def unpack_int4(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """What ``CODECS["int4"].decode`` gives."""
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    groups = group_count(numel)
    _launch(_unpack_int4, groups, codes, scales, _words(out), numel, KIND=_KINDS[dtype])
    return out


def _words(tensor: Tensor) -> Tensor:
    """bfloat16 as the integers of its bits: what Triton's interpreter gets right."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _launch(kernel: Any, groups: int, *arguments: Any, KIND: int) -> None:
    if not groups:
        return
    grid = (triton.cdiv(groups, GROUPS_PER_PROGRAM),)
    sizes = {"ROWS": GROUPS_PER_PROGRAM, "COLUMNS": GROUP}
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, KIND=KIND, **sizes, num_warps=4, enable_fp_fusion=False)


@triton.jit
def _load(at, inside, KIND: tl.constexpr):
    """float32 of what is stored as float32, float16, or the bits of bfloat16."""
    if KIND == 2:
        return (tl.load(at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(at, value, inside, KIND: tl.constexpr):
    """Rounds to nearest even; NaN stays NaN."""
    if KIND == 2:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(at, tl.where(value == value, rounded, 0x7FC0).to(tl.int16), mask=inside)
    elif KIND == 1:
        tl.store(at, value.to(tl.float16), mask=inside)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def _nearest(value):
    """The nearest integer, ties to even, of magnitudes below 2²²."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _is_finite(value):
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _places(numel, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups of this program, the places of their elements, and which of them there are."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, places, places < numel


@triton.jit
def _pack_int8(x, codes, scales, numel, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, places, inside = _places(numel, ROWS, COLUMNS)
    value = _load(x + places, inside, KIND)
    finite = _is_finite(value)
    plain = tl.min(finite.to(tl.int32), axis=1) == 1
    largest = tl.minimum(tl.max(tl.where(finite, tl.abs(value), 0.0), axis=1), 3.402e38)
    levels = tl.where(plain, 127.0, 124.0)
    scale = tl.maximum(tl.div_rn(largest, levels), 1.1754943508222875e-38)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)
    code = _nearest(tl.where(finite, value, 0.0) * inverse[:, None])
    code = tl.minimum(tl.maximum(code, -levels[:, None]), levels[:, None])
    infinite = tl.where(value > 0, 126.0, -126.0)
    code = tl.where(finite, code, tl.where(value == value, infinite, 127.0))
    tl.store(codes + places, code.to(tl.int8), mask=inside)
    tl.store(scales + rows, tl.where(plain, scale, -scale), mask=rows * COLUMNS < numel)


@triton.jit
def _unpack_int8(codes, scales, out, numel, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, places, inside = _places(numel, ROWS, COLUMNS)
    code = tl.load(codes + places, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * COLUMNS < numel, other=1.0)
    value = code * tl.abs(scale)[:, None]
    others = tl.where(code == 127.0, float("nan"), tl.where(code > 0, float("inf"), float("-inf")))
    flagged = (scale < 0)[:, None] & (tl.abs(code) >= 126.0)
    _store(out + places, tl.where(flagged, others, value), inside, KIND)


@triton.jit
def _int4_code(value, low, inverse, levels):
    code = _nearest(tl.minimum((value - low[:, None]) * inverse[:, None], 15.0))
    code = tl.minimum(tl.maximum(code, 0.0), levels[:, None])
    others = tl.where(value == value, tl.where(value > 0, 14.0, 13.0), 15.0)
    return tl.where(_is_finite(value), code, others).to(tl.int32)


@triton.jit
def _pack_int4(x, codes, scales, numel, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, pairs, _ = _places(numel, ROWS, COLUMNS // 2)
    first, second = (
        _load(x + 2 * pairs, 2 * pairs < numel, KIND),
        _load(x + 2 * pairs + 1, 2 * pairs + 1 < numel, KIND),
    )
    finite_1 = _is_finite(first) & (2 * pairs < numel)
    finite_2 = _is_finite(second) & (2 * pairs + 1 < numel)
    low = tl.min(
        tl.minimum(tl.where(finite_1, first, float("inf")), tl.where(finite_2, second, float("inf"))), axis=1
    )
    high = tl.max(
        tl.maximum(tl.where(finite_1, first, float("-inf")), tl.where(finite_2, second, float("-inf"))),
        axis=1,
    )
    some = low <= high
    low = tl.minimum(tl.maximum(tl.where(some, low, 0.0), -3.402e38), 3.402e38) + 0.0  # no negative zero
    high = tl.minimum(tl.maximum(tl.where(some, high, 0.0), -3.402e38), 3.402e38)
    plain = tl.min((_is_finite(first) & _is_finite(second)).to(tl.int32), axis=1) == 1
    levels = tl.where(plain, 15.0, 12.0)
    step = tl.maximum(tl.div_rn(high, levels) - tl.div_rn(low, levels), 1.1754943508222875e-38)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), step)
    lower, upper = _int4_code(first, low, inverse, levels), _int4_code(second, low, inverse, levels)
    upper = tl.where(2 * pairs + 1 < numel, upper, 0)
    tl.store(codes + pairs, (lower | (upper << 4)).to(tl.uint8), mask=2 * pairs < numel)
    there = rows * COLUMNS < numel
    tl.store(scales + 2 * rows, tl.where(plain, step, -step), mask=there)
    tl.store(scales + 2 * rows + 1, low, mask=there)


@triton.jit
def _int4_value(code, step, low):
    value = code.to(tl.float32) * tl.abs(step)[:, None] + low[:, None]
    others = tl.where(code == 15, float("nan"), tl.where(code == 14, float("inf"), float("-inf")))
    return tl.where((step < 0)[:, None] & (code >= 13), others, value)


@triton.jit
def _unpack_int4(codes, scales, out, numel, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, pairs, _ = _places(numel, ROWS, COLUMNS // 2)
    there = rows * COLUMNS < numel
    packed = tl.load(codes + pairs, mask=2 * pairs < numel, other=0).to(tl.int32)
    step = tl.load(scales + 2 * rows, mask=there, other=1.0)
    low = tl.load(scales + 2 * rows + 1, mask=there, other=0.0)
    _store(out + 2 * pairs, _int4_value(packed & 15, step, low), 2 * pairs < numel, KIND)
    _store(out + 2 * pairs + 1, _int4_value(packed >> 4, step, low), 2 * pairs + 1 < numel, KIND)
