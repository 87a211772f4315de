"""Groups of 64 neighbours that share a scale: what the low-bit codecs have in common.

Values that are not finite do not spoil their group: where a group holds any, its scale is stored negative,
and the uppermost codes stand for them. So infinite masks and the NaN of an overflow survive, without a look
at the values from the host.

The arithmetic is fixed (float32, division and multiplication each rounded once, to nearest even), so that
the torch code here and the Triton kernels in ``memfit.techniques.kernels`` give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from memfit.techniques.codecs.base import FLOATS, Codec

GROUP = 64
"""Elements that share a scale."""
TINY = torch.finfo(torch.float32).tiny
LARGEST = 3.402e38
"""Scales are those of values up to here, a little below float32's largest: decoding cannot overflow."""
SLACK = 1.0 + 1e-4
"""Of error bounds: what rounding the scale and the product may add to half a step."""

_CPU_CHUNK = 1 << 16


class GroupCodec(Codec):
    """A lossy codec with a scale for each group."""

    lossless = False
    on_device = True

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS


def chunks(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Pieces of whole groups: on the CPU small ones, so that scratch stays in the cache; else one."""
    step = _CPU_CHUNK if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def grouped(flat: Tensor) -> Tensor:
    """float32 of shape (groups, 64); the last group is filled up with the last value."""
    short = -flat.numel() % GROUP
    x = flat.to(torch.float32)
    return (torch.cat([x, x[-1:].expand(short)]) if short else x).view(-1, GROUP)


def group_count(numel: int) -> int:
    """Groups of so many elements, the last one perhaps not full."""
    return -(-numel // GROUP)


def largest_finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of each group: the largest finite magnitude, and whether it holds others (``None``: no group does)."""
    largest = x.abs().amax(1)
    if x.device.type == "cpu" and bool(largest.isfinite().all()):
        return largest.clamp_max_(LARGEST), None
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0.0).amax(1)
    return largest.clamp_max_(LARGEST), ~finite.all(1)


def levels_of(flagged: Tensor | None, plain: float, with_others: float) -> Tensor | float:
    """Steps from zero to the largest code: fewer where codes are needed for infinities and NaN."""
    if flagged is None:
        return plain
    full = torch.full((), plain, dtype=torch.float32, device=flagged.device)
    return torch.where(flagged, torch.full_like(full, with_others), full)


def signed(scale: Tensor, flagged: Tensor | None) -> Tensor:
    """The scale as it is stored: negative where the group holds values that are not finite."""
    return scale if flagged is None else torch.where(flagged, -scale, scale)


def has_others(scale: Tensor) -> Tensor | None:
    """Which groups hold values that are not finite, of stored scales; ``None`` when none does."""
    flagged = scale < 0
    return None if scale.device.type == "cpu" and not bool(flagged.any()) else flagged


def in_chunks(
    parts: Sequence[Tensor], numel: int, dtype: torch.dtype, decode: Callable[..., Tensor]
) -> Tensor:
    """Decodes chunk by chunk: ``decode(start, stop)`` gives float32 of whole groups."""
    out = torch.empty(numel, dtype=dtype, device=parts[0].device)
    for start, stop in chunks(numel, out.device):
        out[start:stop] = decode(start, stop).view(-1)[: stop - start]
    return out


def bound_of_groups(flat: Tensor, half_step: Callable[[Tensor], Tensor]) -> Tensor:
    """``half_step`` of each group of finite values (others as zeros), for each element, plus the rounding to
    the element's own type."""
    x = grouped(flat)
    x = torch.where(x.isfinite(), x, 0.0).double()
    bound = (half_step(x) * SLACK).expand_as(x).reshape(-1)[: flat.numel()]
    info = torch.finfo(flat.dtype)
    own = flat.abs().double().nan_to_num(0.0, 0.0, 0.0)
    return bound + (own + bound) * info.eps + info.smallest_normal * info.eps
