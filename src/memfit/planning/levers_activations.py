"""Levers on what blocks save: packed to 8 bits until the backward pass reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.capture.graph import StepGraph, Storage
from memfit.core.devices import GPU
from memfit.planning.lever_kinds import Cost, LeverKind, copy_seconds
from memfit.techniques.saved_tensors_blocks import kept_otherwise

_LEAST_ELEMENTS = 4096
"""The technique's default: smaller tensors stay as they are."""
_SHARE = 0.27
"""8 bits and a scale for each group, in parts of fp32."""
_SHARES = {"float32": _SHARE, "tf32": _SHARE, "float16": 2 * _SHARE, "bfloat16": 2 * _SHARE}


def _packed(graph: StepGraph) -> Iterator[Storage]:
    return kept_otherwise(graph, None, _LEAST_ELEMENTS, lambda dtype: _SHARES.get(dtype, 1.0))


def _pack_and_unpack(graph: StepGraph, seconds: Sequence[float], gpu: GPU) -> Cost:
    """Both read one form and write the other."""
    saved = sum(s.size_bytes for s in graph.storages if s.saved and s.category == "activation")
    return Cost(device_seconds=2 * copy_seconds(int(saved * (1 + _SHARE) / 2), gpu))


PACKED = LeverKind(
    name="saved activations in 8 bits",
    axis="activations",
    exactness="approximate",
    settings={"technique": "memory_compression", "compression_algorithm": "int8"},
    storages=_packed,
    cost=_pack_and_unpack,
)
