"""A bit for each element that says whether it is zero, and the others as they are: lossless.

For what ReLU and dropout leave. Zero means all bits zero: a negative zero is kept as a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memfit.techniques.codecs.base import Codec, Parts, from_bytes, raw_bytes

_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Bitmap(Codec):
    """Zeros as bits. Pays from 1 zero in 8 × the element's bytes on; truth values become bits."""

    name = "bitmap"
    mark = 5
    on_device = True

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize in _OF_WIDTH

    def encode(self, flat: Tensor) -> Parts:
        bits = from_bytes(raw_bytes(flat), _OF_WIDTH[flat.dtype.itemsize])
        there = bits != 0
        mask = pack_bits(there)
        return (mask,) if flat.dtype == torch.bool else (mask, bits[there].view(torch.uint8))

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        there = unpack_bits(parts[0], numel)
        if dtype == torch.bool:
            return there
        bits = torch.zeros(numel, dtype=_OF_WIDTH[dtype.itemsize], device=there.device)
        bits[there] = from_bytes(parts[1], bits.dtype)
        return bits.view(dtype)


def pack_bits(there: Tensor) -> Tensor:
    """Eight truth values in a byte, the first in the lowest bit."""
    if there.device.type == "cpu":
        import numpy as np

        return torch.from_numpy(np.packbits(there.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(there.view(torch.uint8), (0, -there.numel() % 8)).view(-1, 8)
    packed = padded[:, 0].clone()
    for place in range(1, 8):
        packed |= padded[:, place] << place
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first ``numel`` truth values that `pack_bits` packed."""
    if packed.device.type == "cpu":
        import numpy as np

        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little")).view(
            torch.bool
        )
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).view(-1)[:numel].view(torch.bool)
