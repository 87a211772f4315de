"""What mixed precision saves on a captured fp32 step, by the types that autocast gives its operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.techniques.bf16_weights import EXTRA_BYTES
from memfit.techniques.saving import MADE_BY_SAMPLES, Saving, saving_of

if TYPE_CHECKING:
    from memfit.capture.graph import StepGraph, Storage
    from memfit.techniques.mixed_precision import MixedPrecisionTraining

_LOWERED = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "matmul",
    "linear",
    "convolution",
    "scaled_dot_product",
    "_flash",
)
_RAISED = ("softmax", "norm", "loss", "exp", "log", "pow", "sum", "cumsum", "embedding")


def estimate(mp: MixedPrecisionTraining, graph: StepGraph) -> Saving:
    """The saving of ``mp`` on the fp32 step ``graph``."""
    trained = {s.name for s in graph.storages if s.category == "optimizer_state"}
    weights = [s for s in graph.storages if s.category == "parameter"]
    extra = 0
    notes = [
        "estimated from operators: sums with fp32 residuals stay fp32, what is read by products is 16 bit"
    ]
    if mp.weights == "bf16":
        extra = sum(s.size_bytes // 4 * EXTRA_BYTES[mp.rounding] for s in weights if s.name in trained)
        if mp.rounding == "nearest":
            notes.append("updates smaller than 0.2 to 0.4 % of a weight are lost: use split or kahan")
    else:
        extra = sum(s.size_bytes // 2 for s in weights if _read_by_products(graph, s))
        notes.append(f"the 16-bit copies of weights that autocast keeps for a step cost {extra} bytes")
    saving = saving_of(graph, _storages(mp, graph), note="; ".join(notes), extra_resting_bytes=extra)
    if mp.weights == "fp32":  # the copies are there during the step only
        saving = replace(saving, resting_bytes=saving.resting_bytes + extra)
    return saving


def _storages(mp: MixedPrecisionTraining, graph: StepGraph) -> Iterator[Storage]:
    low = _low_storages(graph)
    for storage in graph.storages:
        if storage.id in low or (mp.weights == "bf16" and _lowered_with_weights(mp, storage)):
            yield replace(storage, size_bytes=storage.size_bytes // 2)
        else:
            yield storage


def _lowered_with_weights(mp: MixedPrecisionTraining, storage: Storage) -> bool:
    moments = storage.category == "optimizer_state" and storage.size_bytes > 4 and mp.moments == "bf16"
    return moments or storage.category in ("parameter", "gradient")


def _low_storages(graph: StepGraph) -> set[int]:
    """What is 16 bit under autocast: made by products, made of such by others, or read by products only."""
    low: set[int] = set()
    activations = {s.id for s in graph.storages if s.born >= 0 and s.category in MADE_BY_SAMPLES}
    for op in graph.ops:
        if op.phase == "optimizer" or op.is_view:
            continue
        inputs = [i for i in op.inputs if i in activations]
        product = any(part in op.name for part in _LOWERED)
        raised = any(part in op.name for part in _RAISED) and op.phase == "forward"
        if product or (inputs and not raised and all(i in low for i in inputs)):
            low.update(i for i in op.outputs if i in activations)
    for storage in graph.storages:
        readers = [
            op for op in graph.ops if storage.id in op.inputs and op.phase == "forward" and not op.is_view
        ]
        if storage.id in activations and readers and all(_is_product(op.name) for op in readers):
            low.add(storage.id)
    return low


def _is_product(name: str) -> bool:
    return any(part in name for part in _LOWERED)


def _read_by_products(graph: StepGraph, weight: Storage) -> bool:
    return any(weight.id in op.inputs and _is_product(op.name) for op in graph.ops if op.phase == "forward")
