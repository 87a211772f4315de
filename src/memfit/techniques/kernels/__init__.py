"""GPU kernels for what techniques do often, and whether they can be used here."""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from memfit.techniques.codecs.base import Parts


class GroupKernels(Protocol):
    """Packs and unpacks groups with a scale, to the same bits as the torch code of ``codecs``."""

    def pack_int8(self, flat: Tensor) -> Parts: ...
    def unpack_int8(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor: ...
    def pack_int4(self, flat: Tensor) -> Parts: ...
    def unpack_int4(self, codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor: ...


def kernels_for(device: torch.device) -> GroupKernels | None:
    """The Triton kernels, for a CUDA device where Triton can run."""
    return _triton_kernels() if device.type == "cuda" else None


@functools.cache
def _triton_kernels() -> GroupKernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from memfit.techniques.kernels import group_quantization

    return group_quantization
