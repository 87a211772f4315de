"""Runs in a process of its own, with TRITON_INTERPRET=1: the kernels against the torch code, bit for bit."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from memfit.techniques.codecs import CODECS
from memfit.techniques.kernels import group_quantization as kernels


def tensors() -> dict[str, Tensor]:
    """Ordinary values, ties, the ends of the ranges, and what is not finite; lengths that fill no group."""
    torch.manual_seed(0)
    hard = torch.randn(64 * 5 + 7)
    hard[3], hard[70], hard[71], hard[200] = torch.inf, -torch.inf, torch.nan, 0.0
    wide = torch.randn(640) * torch.logspace(-44, 37, 640)
    ends = torch.tensor([torch.finfo(torch.float32).max, 1.0, -1.0, 0.0, 1e-45, -0.0] * 11)
    ties = torch.arange(-127, 128).float() + 0.5
    return {
        "normal": torch.randn(64 * 40),
        "odd": torch.randn(64 * 33 + 13) * 3 + 1,
        "hard": hard,
        "wide": wide,
        "ends": ends,
        "ties": torch.cat([ties, torch.tensor([127.0])]),
        "one": torch.tensor([2.5]),
        "all infinite": torch.full((65,), torch.inf),
        "zeros": torch.zeros(64),
    }


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but for the payload of NaN."""
    if a.dtype.is_floating_point:
        nans = a.isnan()
        if not torch.equal(nans, b.isnan()):
            return False
        a, b = a.masked_fill(nans, 0.0), b.masked_fill(nans, 0.0)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def main() -> None:
    """Prints the cases that differ, as JSON."""
    different = []
    for name, values in tensors().items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = values.to(dtype)
            for bits in ("int8", "int4"):
                parts = getattr(kernels, f"pack_{bits}")(x)
                expected = CODECS[bits].encode(x)
                if not all(same(a, b) for a, b in zip(parts, expected, strict=True)):
                    different.append(f"pack_{bits} {name} {dtype}")
                if bits == "int8":
                    back = kernels.unpack_int8(*expected, dtype)
                else:
                    back = kernels.unpack_int4(*expected, x.numel(), dtype)
                if not same(back, CODECS[bits].decode(expected, x.numel(), dtype)):
                    different.append(f"unpack_{bits} {name} {dtype}")
    json.dump(different, sys.stdout)


if __name__ == "__main__":
    main()
