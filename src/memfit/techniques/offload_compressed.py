"""Compressed before it is moved: one keeper in front of another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.techniques.codecs import CODECS
from memfit.techniques.compressed_tensor import RAW, CompressedTensor, compressed_by

if TYPE_CHECKING:
    from memfit.techniques.saved_tensors import Keeper, Kept, Place


class CompressedFirst:
    """A keeper that hands the parts of the compressed contents to another keeper."""

    def __init__(self, keeper: Keeper, algorithm: str) -> None:
        self.min_elements = keeper.min_elements
        self._keeper, self._algorithm = keeper, algorithm

    def __reduce__(self) -> tuple[type[CompressedFirst], tuple[Any, ...]]:
        return CompressedFirst, (self._keeper, self._algorithm)

    def keep(self, flat: Tensor, place: Place) -> Kept | None:
        """The compressed parts, elsewhere; contents that do not get smaller move as they are."""
        packed = compressed_by(CODECS[self._algorithm], flat)
        if packed.codec == RAW:
            return self._keeper.keep(flat, place)
        return _PartsElsewhere(packed, [self._keeper.keep(part, place) for part in packed.parts])


class _PartsElsewhere:
    """The description of a compressed tensor, and where its parts are; ``None``: here."""

    def __init__(self, packed: CompressedTensor, places: list[Kept | None]) -> None:
        here = tuple(
            p if kept is None else torch.empty(0) for p, kept in zip(packed.parts, places, strict=True)
        )
        self._packed, self._places = replace(packed, parts=here), places

    def flat(self) -> Tensor:
        pairs = zip(self._packed.parts, self._places, strict=True)
        parts = tuple(part if kept is None else kept.flat() for part, kept in pairs)
        return replace(self._packed, parts=parts).flat()
