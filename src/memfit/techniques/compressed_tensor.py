"""A tensor in compressed form: a value, with all that is needed to get the tensor back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.core.errors import UsageError
from memfit.techniques.codecs import CODECS, Codec
from memfit.techniques.codecs.base import Parts

RAW = "raw"
"""In place of a codec's name, where none made the tensor smaller."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedTensor:
    """A tensor (or numpy array) as a codec left it.

    Attributes:
        codec: name of the codec, or ``"raw"``.
        parts: one-dimensional tensors that hold its bytes; for ``"raw"`` a copy of the tensor.
        shape, dtype, device: of the tensor.
        is_array: whether it was a numpy array.
    """

    codec: str
    parts: Parts
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_array: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed form, without its description."""
        return sum(part.nbytes for part in self.parts)

    @property
    def original_nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return int(torch.Size(self.shape).numel())

    def flat(self) -> Tensor:
        """The elements again, one-dimensional; for ``"raw"`` the kept ones themselves."""
        if self.codec == RAW:
            return self.parts[0]
        decoded = CODECS[self.codec].decode(self.parts, self.numel, self.dtype)
        return decoded if decoded.device == self.device else decoded.to(self.device, non_blocking=True)

    def tensor(self) -> Tensor:
        """The tensor again, in memory of its own."""
        flat = self.flat()
        return (flat.clone() if self.codec == RAW else flat).view(self.shape)


def compressed_by(codec: Codec | None, tensor: Tensor, *, is_array: bool = False) -> CompressedTensor:
    """``tensor`` through ``codec``; raw where there is none, or where it would come out larger."""
    flat = tensor.detach().contiguous().view(-1)
    parts: Parts | None = None
    if codec is not None and flat.numel() and codec.takes(flat.dtype):
        parts = codec.encode(flat)
    if codec is None or parts is None or sum(part.nbytes for part in parts) >= flat.nbytes:
        name, parts = RAW, (flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat,)
    else:
        name = codec.name
    return CompressedTensor(
        codec=name,
        parts=parts,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=tensor.device,
        is_array=is_array,
    )


def plain_tensor(data: Any) -> Tensor:
    """A tensor of ``data``. UsageError for what no codec can read (sparse, quantized, a subclass)."""
    if not isinstance(data, Tensor):
        raise UsageError(
            f"a torch.Tensor, a numpy array or bytes can be compressed, not a {type(data).__name__}"
        )
    if type(data) not in (Tensor, torch.nn.Parameter) or data.layout != torch.strided or data.is_quantized:
        raise UsageError(
            f"a {type(data).__name__} of layout {data.layout} cannot be compressed; give its plain parts "
            "(indices and values, or the shards)"
        )
    return data.detach().resolve_conj().resolve_neg()
