"""Four bits for each number: 64 neighbours share a lowest value and a step; error at most 1/30 of a range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memfit.techniques.codecs.base import Parts
from memfit.techniques.codecs.groups import (
    GROUP,
    LARGEST,
    TINY,
    GroupCodec,
    bound_of_groups,
    chunks,
    group_count,
    grouped,
    has_others,
    in_chunks,
    levels_of,
    signed,
)

LEVELS, LEVELS_WITH_OTHERS = 15.0, 12.0
MINUS_INFINITE, INFINITE, NOT_A_NUMBER = 13, 14, 15
"""The codes of what is not finite, in groups that hold any."""


class Int4(GroupCodec):
    """Affine: code = round((x - lowest) / step), step = (highest - lowest) / 15; two codes in a byte.

    Bound: |error| ≤ step / 2, so 1/30 of the group's range (1/24 in a group with infinities or NaN, which
    come back as they are), plus rounding to float32 and to the tensor's own type. For ranges below float32's
    largest number.
    """

    name = "int4"
    mark = 7
    bits = 4 + 64 / GROUP

    def encode(self, flat: Tensor) -> Parts:
        from memfit.techniques.kernels import kernels_for

        if (kernels := kernels_for(flat.device)) is not None:
            return kernels.pack_int4(flat)
        codes = torch.empty(-(-flat.numel() // 2), dtype=torch.uint8, device=flat.device)
        scales = torch.empty((group_count(flat.numel()), 2), dtype=torch.float32, device=flat.device)
        for start, stop in chunks(flat.numel(), flat.device):
            code, scale = _encode(grouped(flat[start:stop]))
            codes[start // 2 : -(-stop // 2)] = _two_in_a_byte(code, stop - start)
            scales[start // GROUP : group_count(stop)] = scale
        return codes, scales.view(-1)

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        from memfit.techniques.kernels import kernels_for

        codes, scales = parts[0], parts[1].view(-1, 2)
        if (kernels := kernels_for(codes.device)) is not None:
            return kernels.unpack_int4(codes, scales, numel, dtype)

        def decoded(start: int, stop: int) -> Tensor:
            pairs = codes[start // 2 : -(-stop // 2)]
            code = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1)
            return _decode(grouped(code), scales[start // GROUP : group_count(stop)])

        return in_chunks(parts, numel, dtype, decoded)

    def error_bound(self, flat: Tensor) -> Tensor:
        others = ~grouped(flat).isfinite().all(1, keepdim=True)
        levels = torch.where(others, LEVELS_WITH_OTHERS, LEVELS).double()

        def half_step(x: Tensor) -> Tensor:
            low, high = _range(grouped(flat))
            low, high = low.double().unsqueeze(1), high.double().unsqueeze(1)
            step = ((high - low) / levels).clamp_min(TINY)
            return step / 2 + torch.maximum(low.abs(), high.abs()) * 2.0**-21

        return bound_of_groups(flat, half_step)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest finite value of each group; zeros where it has none."""
    finite = x.isfinite()
    low = torch.where(finite, x, torch.inf).amin(1)
    high = torch.where(finite, x, -torch.inf).amax(1)
    some = low <= high
    return torch.where(some, low, 0.0), torch.where(some, high, 0.0)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.amin(1), x.amax(1)
    flagged: Tensor | None = None
    if x.device.type != "cpu" or not bool((low.isfinite() & high.isfinite()).all()):
        low, high = _range(x)
        flagged = ~x.isfinite().all(1)
    low = low.clamp(-LARGEST, LARGEST) + 0.0  # no negative zero
    high = high.clamp(-LARGEST, LARGEST)
    levels = levels_of(flagged, LEVELS, LEVELS_WITH_OTHERS)
    step = (high / levels - low / levels).clamp_min_(TINY)
    code = ((x - low.unsqueeze(1)) * step.reciprocal().unsqueeze(1)).round_()
    if flagged is None:
        return code.clamp_(0.0, LEVELS), torch.stack([step, low], dim=1)
    assert isinstance(levels, Tensor)
    code = torch.minimum(code.clamp_min_(0.0), levels.unsqueeze(1))
    code = torch.where(x.isinf(), torch.where(x > 0, float(INFINITE), float(MINUS_INFINITE)), code)
    code = torch.where(x.isnan(), float(NOT_A_NUMBER), code)
    return code, torch.stack([signed(step, flagged), low], dim=1)


def _two_in_a_byte(code: Tensor, numel: int) -> Tensor:
    pairs = code.to(torch.uint8).view(-1)[: numel + numel % 2].view(-1, 2)
    if numel % 2:
        pairs[-1, 1] = 0
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _decode(code: Tensor, scales: Tensor) -> Tensor:
    step, low = scales[:, :1], scales[:, 1:]
    value = (code * step.abs()).add_(low)
    flagged = has_others(step)
    if flagged is None:
        return value
    others = torch.where(code == INFINITE, torch.inf, torch.nan)
    others = torch.where(code == MINUS_INFINITE, -torch.inf, others)
    return torch.where(flagged & (code >= MINUS_INFINITE), others, value)
