"""Levers on precision: products in bf16, and weights in bf16 with what keeps small updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memfit.capture.costs import op_class, roofline_seconds
from memfit.capture.graph import StepGraph, Storage
from memfit.core.devices import GPU
from memfit.planning.lever_kinds import Cost, LeverKind

_PRODUCTS = ("gemm", "attention", "convolution")
"""Classes of operators that autocast runs in the lower precision."""


def _activations_in_bf16(graph: StepGraph) -> Iterator[Storage]:
    """What products read and make in the forward pass is half as large; each weight has a copy of half its
    size while the step goes on."""
    low = {
        storage
        for op in graph.ops
        if op.phase == "forward" and _is_fp32_product(op.name, op.dtype)
        for storage in op.outputs
    }
    for storage in graph.storages:
        if storage.id in low and storage.born >= 0:
            yield replace(storage, size_bytes=storage.size_bytes // 2)
        else:
            yield storage
        if storage.category == "parameter":
            yield replace(storage, size_bytes=storage.size_bytes // 2, category="temporary", born=0, died=-1)


def _weights_in_bf16(graph: StepGraph) -> Iterator[Storage]:
    """Gradients and states are 16 bit too; the low bits of weights that are kept apart make them 32 again."""
    for storage in _activations_in_bf16(graph):
        if storage.category in ("gradient", "optimizer_state"):
            yield replace(storage, size_bytes=storage.size_bytes // 2)
        elif storage.category != "temporary" or storage.born != 0 or storage.died != -1:
            yield storage


def _faster(graph: StepGraph, seconds: Sequence[float], gpu: GPU) -> Cost:
    """Products at the rate of bf16, moving half the bytes."""
    gained = 0.0
    for op in graph.ops:
        if _is_fp32_product(op.name, op.dtype):
            then = roofline_seconds(op.name, round(op.flops * op.work), op.bytes_moved // 2, "bfloat16", gpu)
            gained += max(seconds[op.index] - then, 0.0)
    return Cost(device_seconds=-gained)


def _is_fp32_product(name: str, dtype: str) -> bool:
    return dtype in ("float32", "tf32") and op_class(name).name in _PRODUCTS


BF16 = LeverKind(
    name="bf16 autocast",
    axis="precision",
    exactness="approximate",
    settings={"technique": "mixed_precision", "precision": "bf16"},
    storages=_activations_in_bf16,
    cost=_faster,
)
BF16_WEIGHTS = LeverKind(
    name="bf16 weights",
    axis="precision",
    exactness="approximate",
    settings={"technique": "mixed_precision", "precision": "bf16", "weights": "bf16"},
    storages=_weights_in_bf16,
    cost=_faster,
    apart=("optimizer step in the backward pass", "optimizer state in host memory", "8-bit optimizer state"),
)
