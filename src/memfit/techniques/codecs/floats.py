"""Shorter floating-point numbers: bfloat16, and 8-bit ones with a scale for each group of 64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from memfit.techniques.codecs.base import Codec, Parts
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


class BFloat16(Codec):
    """float32 rounded to bfloat16, half the bytes.

    Bound: |error| ≤ 2⁻⁸ |x| (2⁻¹³⁴ below the normal range); above 3.3895e38, bfloat16's largest, numbers
    become infinite. Infinities and NaN stay.
    """

    name = "bf16"
    mark = 8
    lossless = False
    on_device = True
    bits = 16.0

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def encode(self, flat: Tensor) -> Parts:
        return (flat.to(torch.bfloat16),)

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def error_bound(self, flat: Tensor) -> Tensor:
        return flat.abs().double().nan_to_num(0.0, 0.0, 0.0) * 2.0**-8 + 2.0**-134


class FP8E4M3(GroupCodec):
    """Eight-bit floats with three bits of mantissa, scaled so that the group's largest magnitude is 448.

    Bound: |error| ≤ 2⁻⁴ |x|, and 2⁻¹⁰ scale for the smallest; scale = largest / 448 (/ 416 in a group with
    infinities or NaN, which come back as they are). Wider range within a group than int8, less precision.
    """

    name = "fp8"
    mark = 9
    bits = 8 + 32 / GROUP
    float8: ClassVar[torch.dtype] = torch.float8_e4m3fn
    highest: ClassVar[tuple[float, float]] = (448.0, 416.0)
    relative: ClassVar[float] = 2.0**-4
    absolute: ClassVar[float] = 2.0**-10
    others: ClassVar[tuple[int, int, int]] = (0x7E, 0xFE, 0x7F)

    def encode(self, flat: Tensor) -> Parts:
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        scales = torch.empty(group_count(flat.numel()), dtype=torch.float32, device=flat.device)
        for start, stop in chunks(flat.numel(), flat.device):
            x = grouped(flat[start:stop])
            largest, flagged = largest_finite(x)
            scale = (largest / levels_of(flagged, *self.highest)).clamp_min_(TINY)
            code = (x * scale.reciprocal().unsqueeze(1)).to(self.float8).view(torch.uint8)
            if flagged is not None:
                code = self._with_others(code, x)
            codes[start:stop] = code.view(-1)[: stop - start]
            scales[start // GROUP : group_count(stop)] = signed(scale, flagged)
        return codes, scales

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        codes, scales = parts

        def decoded(start: int, stop: int) -> Tensor:
            code = codes[start:stop]
            code = torch.nn.functional.pad(code, (0, -code.numel() % GROUP)).view(-1, GROUP)
            scale = scales[start // GROUP : group_count(stop)].unsqueeze(1)
            value = code.view(self.float8).to(torch.float32) * scale.abs()
            flagged = has_others(scale)
            return value if flagged is None else self._others_back(value, code, flagged)

        return in_chunks(parts, numel, dtype, decoded)

    def error_bound(self, flat: Tensor) -> Tensor:
        others = ~grouped(flat).isfinite().all(1, keepdim=True)
        highest = torch.where(others, self.highest[1], self.highest[0]).double()

        def half_step(x: Tensor) -> Tensor:
            scale = (x.abs().amax(1, keepdim=True) / highest).clamp_min(TINY)
            return torch.maximum(x.abs() * self.relative, scale * self.absolute)

        return bound_of_groups(flat, half_step)

    def _with_others(self, code: Tensor, x: Tensor) -> Tensor:
        infinite, minus, nan = (torch.tensor(c, dtype=torch.uint8, device=x.device) for c in self.others)
        code = torch.where(x == torch.inf, infinite, code)
        return torch.where(x.isnan(), nan, torch.where(x == -torch.inf, minus, code))

    def _others_back(self, value: Tensor, code: Tensor, flagged: Tensor) -> Tensor:
        infinite, minus, nan = self.others
        value = torch.where(flagged & (code == infinite), torch.inf, value)
        value = torch.where(flagged & (code == minus), -torch.inf, value)
        return torch.where(flagged & (code == nan), torch.nan, value)


class FP8E5M2(FP8E4M3):
    """Eight-bit floats with two bits of mantissa: error up to 2⁻³ |x|, for values of very unlike sizes."""

    name = "fp8-e5m2"
    mark = 10
    float8 = torch.float8_e5m2
    highest = (57344.0, 57344.0)
    relative = 2.0**-3
    absolute = 2.0**-17
    others = (0x7C, 0xFC, 0x7F)
