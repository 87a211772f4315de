"""Exponents apart from mantissas, and entropy coding for what is not noise: lossless.

The bits of trained weights, gradients and activations are noise, but for those of the exponent: numbers of
one tensor are of few magnitudes. A general compressor sees bytes in which exponent and mantissa bits are
mixed. Here the eight exponent bits of each number become one plane of bytes, sign and upper mantissa bits
another, the rest a third; each plane that a sample shows to be compressible goes through zstd, the others
stay as they are. float16 and bfloat16 likewise; integers and float64 become planes of their bytes.

Source of the idea: ZipNN (Hershcovitch et al. 2024, arXiv:2411.05239), which uses Huffman codes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memfit.core.errors import InputError
from memfit.techniques.codecs.base import Codec, Parts, from_bytes, raw_bytes
from memfit.techniques.codecs.bytewise import Zstd, ZstdLiterals, as_tensor

Plane = npt.NDArray[Any]

_CHUNK = 1 << 16
"""Elements taken at a time, so that scratch stays in the processor's cache."""
_SAMPLE_BYTES = 8 << 10
_WORTH_IT = 0.95


class ExponentSplit(Codec):
    """Planes of bytes by meaning, each entropy-coded where it pays."""

    name = "exponent-split"
    mark = 4

    def encode(self, flat: Tensor) -> Parts:
        bits = raw_bytes(flat.cpu()).numpy()
        split, _, floats = _WAYS.get(flat.dtype, (_split_bytes(flat.dtype.itemsize), None, False))
        planes = split(bits)
        return tuple(_shrunk(plane, exponents=floats and number == 0) for number, plane in enumerate(planes))

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        _, join, _ = _WAYS.get(dtype, (None, _join_bytes, False))
        widths = _WIDTHS.get(dtype, (1,) * dtype.itemsize)
        if len(parts) != len(widths):
            raise InputError(f"not what {self.name} wrote: {len(parts)} planes for {dtype}")
        planes = [_grown(part, numel * width) for part, width in zip(parts, widths, strict=True)]
        return from_bytes(torch.from_numpy(join(planes).view(np.uint8)), dtype)


def _shrunk(plane: Plane, *, exponents: bool) -> Tensor:
    """The plane through zstd, or as it is; which one, its length tells."""
    data = plane.view(np.uint8)
    codec = ZstdLiterals() if exponents else Zstd()
    if _ratio_of_sample(data, codec) < _WORTH_IT:
        shrunk = codec.shrink(data.data)
        if len(shrunk) < data.size:
            return as_tensor(shrunk)
    return torch.from_numpy(data)


def _ratio_of_sample(data: Plane, codec: Zstd) -> float:
    if data.size <= 4 * _SAMPLE_BYTES:
        return 0.0  # trying is as cheap as sampling
    starts = (0, data.size // 2, data.size - _SAMPLE_BYTES)
    sample = np.concatenate([data[start : start + _SAMPLE_BYTES] for start in starts])
    return len(codec.shrink(sample.data)) / sample.size


def _grown(part: Tensor, size_bytes: int) -> Plane:
    data = part.numpy()
    return data if data.size == size_bytes else np.frombuffer(Zstd().grow(data.data, size_bytes), np.uint8)


def _split_32(bits: Plane) -> list[Plane]:
    words = bits.view(np.uint32)
    exponent, upper = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
    lower = np.empty(words.size, np.uint16)
    halves = bits.view(np.uint16)[_LOW_HALF::2]
    one, two = np.empty((2, min(_CHUNK, words.size)), np.uint32)
    for start in range(0, words.size, _CHUNK):
        stop = min(start + _CHUNK, words.size)
        word, a, b = words[start:stop], one[: stop - start], two[: stop - start]
        exponent[start:stop] = np.right_shift(word, 23, out=a)
        upper[start:stop] = _sign_and_mantissa(word, 16, a, b)
        lower[start:stop] = halves[start:stop]
    return [exponent, upper, lower]


def _join_32(planes: list[Plane]) -> Plane:
    exponent, upper = planes[0], planes[1]
    lower = planes[2].view(np.uint16)
    words = np.empty(exponent.size, np.uint32)
    one = np.empty(min(_CHUNK, words.size), np.uint32)
    for start in range(0, words.size, _CHUNK):
        stop = min(start + _CHUNK, words.size)
        word, a = words[start:stop], one[: stop - start]
        word[:] = exponent[start:stop]
        word <<= 23
        _put_sign_and_mantissa(word, upper[start:stop], 16, a)
        word |= lower[start:stop]
    return words


def _split_16(bits: Plane) -> list[Plane]:
    words = bits.view(np.uint16)
    exponent, rest = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
    one, two = np.empty((2, min(2 * _CHUNK, words.size)), np.uint16)
    for start in range(0, words.size, 2 * _CHUNK):
        stop = min(start + 2 * _CHUNK, words.size)
        word, a, b = words[start:stop], one[: stop - start], two[: stop - start]
        np.copyto(exponent[start:stop], np.right_shift(word, 7, out=a), casting="unsafe")
        np.copyto(rest[start:stop], _sign_and_mantissa(word, 0, a, b), casting="unsafe")
    return [exponent, rest]


def _join_16(planes: list[Plane]) -> Plane:
    exponent, rest = planes
    words = np.empty(exponent.size, np.uint16)
    one = np.empty(min(2 * _CHUNK, words.size), np.uint16)
    for start in range(0, words.size, 2 * _CHUNK):
        stop = min(start + 2 * _CHUNK, words.size)
        word = words[start:stop]
        word[:] = exponent[start:stop]
        word <<= 7
        _put_sign_and_mantissa(word, rest[start:stop], 0, one[: stop - start])
    return words


def _sign_and_mantissa(word: Plane, shift: int, a: Plane, b: Plane) -> Plane:
    """The sign as the upper bit of a byte, and the seven mantissa bits at ``shift``, in scratch ``a``."""
    np.right_shift(word, 8 * word.itemsize - 8, out=a)
    np.bitwise_and(a, 0x80, out=a)
    np.right_shift(word, shift, out=b)
    np.bitwise_and(b, 0x7F, out=b)
    return np.bitwise_or(a, b, out=a)


def _put_sign_and_mantissa(word: Plane, rest: Plane, shift: int, a: Plane) -> None:
    a[:] = rest
    a &= 0x80
    a <<= 8 * word.itemsize - 8
    word |= a
    a[:] = rest
    a &= 0x7F
    a <<= shift
    word |= a


def _split_bytes(width: int) -> Callable[[Plane], list[Plane]]:
    return lambda bits: [np.ascontiguousarray(bits.reshape(-1, width)[:, place]) for place in range(width)]


def _join_bytes(planes: list[Plane]) -> Plane:
    return np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1)


_LOW_HALF = 0 if np.little_endian else 1
_WAYS: dict[torch.dtype, tuple[Any, Any, bool]] = {
    torch.float32: (_split_32, _join_32, True),
    torch.bfloat16: (_split_16, _join_16, True),
    torch.float16: (_split_16, _join_16, True),
}
_WIDTHS = {torch.float32: (1, 1, 2), torch.bfloat16: (1, 1), torch.float16: (1, 1)}
