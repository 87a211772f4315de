"""Eight bits for each number: 64 neighbours share a scale, error at most 1/254 of their largest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memfit.techniques.codecs.base import Parts
from memfit.techniques.codecs.groups import (
    GROUP,
    TINY,
    GroupCodec,
    bound_of_groups,
    chunks,
    group_count,
    grouped,
    has_others,
    in_chunks,
    largest_finite,
    levels_of,
    signed,
)

LEVELS, LEVELS_WITH_OTHERS = 127.0, 124.0
INFINITE, NOT_A_NUMBER = 126, 127
"""The codes of infinities (by sign) and of NaN, in groups that hold any."""


class Int8(GroupCodec):
    """Symmetric: code = round(x / scale), scale = the group's largest magnitude / 127.

    Bound: |error| ≤ scale / 2, so 1/254 of the group's largest magnitude (1/248 in a group with infinities or
    NaN, which come back as they are), plus the rounding to the tensor's own type.
    """

    name = "int8"
    mark = 6
    bits = 8 + 32 / GROUP

    def encode(self, flat: Tensor) -> Parts:
        from memfit.techniques.kernels import kernels_for

        if (kernels := kernels_for(flat.device)) is not None:
            return kernels.pack_int8(flat)
        codes = torch.empty(flat.numel(), dtype=torch.int8, device=flat.device)
        scales = torch.empty(group_count(flat.numel()), dtype=torch.float32, device=flat.device)
        for start, stop in chunks(flat.numel(), flat.device):
            code, scale = _encode(grouped(flat[start:stop]))
            codes[start:stop] = code.view(-1)[: stop - start]
            scales[start // GROUP : group_count(stop)] = scale
        return codes, scales

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        from memfit.techniques.kernels import kernels_for

        codes, scales = parts
        if (kernels := kernels_for(codes.device)) is not None:
            return kernels.unpack_int8(codes, scales, dtype)

        def decoded(start: int, stop: int) -> Tensor:
            return _decode(grouped(codes[start:stop]), scales[start // GROUP : group_count(stop)])

        return in_chunks(parts, numel, dtype, decoded)

    def error_bound(self, flat: Tensor) -> Tensor:
        others = ~grouped(flat).isfinite().all(1, keepdim=True)
        levels = torch.where(others, LEVELS_WITH_OTHERS, LEVELS).double()
        return bound_of_groups(flat, lambda x: (x.abs().amax(1, keepdim=True) / levels).clamp_min(TINY) / 2)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    largest, flagged = largest_finite(x)
    levels = levels_of(flagged, LEVELS, LEVELS_WITH_OTHERS)
    scale = (largest / levels).clamp_min_(TINY)
    code = (x * scale.reciprocal().unsqueeze(1)).round_()
    if flagged is None:
        return code.clamp_(-LEVELS, LEVELS), scale
    assert isinstance(levels, Tensor)
    code = torch.minimum(torch.maximum(code, -levels.unsqueeze(1)), levels.unsqueeze(1))
    code = torch.where(x.isinf(), torch.where(x > 0, float(INFINITE), -float(INFINITE)), code)
    return torch.where(x.isnan(), float(NOT_A_NUMBER), code), signed(scale, flagged)


def _decode(code: Tensor, scale: Tensor) -> Tensor:
    value = code * scale.abs().unsqueeze(1)
    flagged = has_others(scale)
    if flagged is None:
        return value
    of_others = flagged.unsqueeze(1) & (code.abs() >= INFINITE)
    others = torch.where(
        code == NOT_A_NUMBER, torch.nan, torch.copysign(torch.full_like(code, torch.inf), code)
    )
    return torch.where(of_others, others, value)
