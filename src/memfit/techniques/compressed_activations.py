"""Keeps what blocks save for the backward pass compressed, each place by the codec that suits its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from memfit.techniques.codecs import Codec
from memfit.techniques.compressed_tensor import RAW, CompressedTensor, compressed_by

if TYPE_CHECKING:
    import torch

    from memfit.techniques.compression import MemoryCompression
    from memfit.techniques.saved_tensors import Place

_MEASURE_AGAIN = 100
"""Uses of a place after which its codec is chosen anew: activations change while a model trains."""


class ActivationPacker:
    """A keeper that compresses. The codec of a place is chosen at its first use, and again now and then."""

    def __init__(self, settings: MemoryCompression) -> None:
        self.settings = settings
        self.min_elements = settings.min_elements
        self._chosen: dict[tuple[Place, torch.dtype], tuple[Codec | None, int]] = {}

    def __reduce__(self) -> tuple[type[ActivationPacker], tuple[MemoryCompression]]:
        return ActivationPacker, (self.settings,)

    def keep(self, flat: Tensor, place: Place) -> CompressedTensor | None:
        """The values compressed; ``None`` where that would not make them smaller."""
        codec, error = self._codec(flat, place)
        if codec is None:
            self.settings.ledger.add(RAW, flat.nbytes, flat.nbytes)
            return None
        packed = compressed_by(codec, flat)
        self.settings.ledger.add(packed.codec, flat.nbytes, packed.nbytes, error)
        return None if packed.codec == RAW else packed

    def _codec(self, flat: Tensor, place: Place) -> tuple[Codec | None, float]:
        codec, left = self._chosen.get((place, flat.dtype), (None, 0))
        error = 0.0
        if left == 0:
            codec, error = self.settings.codec_for(flat, use="activations")
            left = _MEASURE_AGAIN
        self._chosen[place, flat.dtype] = codec, left - 1
        return codec, error
