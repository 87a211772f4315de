"""What a codec is: it turns a flat tensor into fewer bytes, and back, to the bit or within a stated bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]
"""What a codec makes of a tensor: one-dimensional contiguous tensors, whose bytes are the compressed form."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""The types that lossy codecs take; all else they leave to the lossless ones."""


class Codec(ABC):
    """One way to make a tensor smaller. Has no state: safe to use from several threads.

    Attributes:
        name: as in `CODECS`.
        mark: the byte that says in stored data which codec made it.
        lossless: whether ``decode(encode(x))`` is ``x`` to the bit, NaN payloads and signs of zero included.
        on_device: works where the tensor is; otherwise in host memory.
        bits: bits of one element, scales included, where they are the same for all values; else ``None``.
    """

    name: ClassVar[str]
    mark: ClassVar[int]
    lossless: ClassVar[bool] = True
    on_device: ClassVar[bool] = False
    bits: ClassVar[float | None] = None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type can be encoded."""
        return True

    @abstractmethod
    def encode(self, flat: Tensor) -> Parts:
        """The compressed form of a one-dimensional contiguous tensor; may come out larger."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """A new one-dimensional tensor of ``numel`` elements, on the device of the parts."""

    def error_bound(self, flat: Tensor) -> Tensor:
        """The largest absolute error of each element (float64); zeros for lossless codecs."""
        return torch.zeros(flat.shape, dtype=torch.float64, device=flat.device)


def raw_bytes(flat: Tensor) -> Tensor:
    """The bytes of a one-dimensional contiguous tensor, as uint8, without a copy."""
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes are ``data`` (uint8); copied only where the address does not fit the type."""
    if not data.numel():
        return torch.empty(0, dtype=dtype, device=data.device)
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
