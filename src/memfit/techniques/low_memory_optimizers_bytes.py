"""Bytes of optimizer state, exactly, from the shapes of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

LEAST_QUANTIZED = 4096
"""Tensors with fewer elements stay 32 bit, in bitsandbytes and in torchao."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A parameter as an optimizer sees it: its shape and the bytes of one of its elements."""

    shape: tuple[int, ...]
    itemsize: int = 4

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


def adam(shape: Shape) -> int:
    """PyTorch's Adam and AdamW: two moments of the parameter's type and a step counter."""
    return 2 * shape.elements * shape.itemsize + 4


def sgd_momentum(shape: Shape) -> int:
    """PyTorch's SGD with momentum: one buffer."""
    return shape.elements * shape.itemsize


def adafactor(shape: Shape) -> int:
    """PyTorch's Adafactor: a row and a column of the second moment for matrices, else the whole."""
    if len(shape.shape) > 1:
        batch = math.prod(shape.shape[:-2])
        return batch * (shape.shape[-2] + shape.shape[-1]) * shape.itemsize + 4
    return shape.elements * shape.itemsize + 4


def blockwise_8bit(shape: Shape, moments: int = 2) -> int:
    """bitsandbytes: a byte for each element and a float for each 256; the code tables are shared."""
    if shape.elements < LEAST_QUANTIZED:
        return moments * shape.elements * 4
    return moments * (shape.elements + 4 * math.ceil(shape.elements / 256))


def torchao(shape: Shape, *, bits: int, block: int, table: int) -> int:
    """torchao: two moments of ``bits``, a float for each ``block``, a table each, and a step counter."""
    if shape.elements < LEAST_QUANTIZED or shape.elements % block:
        return adam(shape)
    return 2 * (shape.elements * bits // 8 + 4 * shape.elements // block + 4 * table) + 4


def total(shapes: Iterable[Shape], of_one: Callable[[Shape], int], *, shared_if_quantized: int = 0) -> int:
    """The sum over the parameters, with what is there once as soon as one of them is quantized."""
    listed = list(shapes)
    shared = shared_if_quantized if any(s.elements >= LEAST_QUANTIZED for s in listed) else 0
    return sum(map(of_one, listed)) + shared


BYTES: Mapping[str, Callable[[Iterable[Shape]], int]] = {
    "adam": lambda shapes: total(shapes, adam),
    "sgd": lambda shapes: total(shapes, sgd_momentum),
    "adafactor": lambda shapes: total(shapes, adafactor),
    "bitsandbytes:8": lambda shapes: total(shapes, blockwise_8bit, shared_if_quantized=2048),
    "bitsandbytes:lion8": lambda shapes: total(
        shapes, lambda shape: blockwise_8bit(shape, 1), shared_if_quantized=1024
    ),
    "torchao:8": lambda shapes: total(shapes, lambda s: torchao(s, bits=8, block=256, table=256)),
    "torchao:4": lambda shapes: total(shapes, lambda s: torchao(s, bits=4, block=128, table=16)),
}
"""By back-end and width: the bytes of the whole state after the first step."""
