"""Levers on the optimizer: its step in the backward pass, small states, states in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memfit.capture.graph import StepGraph, Storage
from memfit.core.devices import GPU
from memfit.planning.lever_kinds import (
    HOST_BYTES_PER_SECOND,
    HOST_STEP_BYTES,
    Cost,
    LeverKind,
    link_seconds,
    phase_seconds,
    state_bytes,
    trained_bytes,
)

_SMALL_STATE_SHARE = 0.26
"""8-bit moments with a scale for each block of 256, in parts of fp32 ones."""


def _stepped_in_backward(graph: StepGraph) -> Iterator[Storage]:
    """A gradient is gone with the last operator of the backward pass that writes it; no step makes
    temporaries."""
    last: dict[int, int] = {}
    for op in graph.ops:
        if op.phase == "backward":
            last |= dict.fromkeys((*op.inputs, *op.outputs, *op.mutates), op.index)
    for storage in graph.storages:
        if storage.category == "gradient" and storage.born >= 0:
            yield replace(storage, died=max(last.get(storage.id, storage.born), storage.born))
        elif not _made_by_step(graph, storage):
            yield storage


def _small_state(graph: StepGraph) -> Iterator[Storage]:
    for storage in graph.storages:
        if storage.category == "optimizer_state":
            yield replace(storage, size_bytes=int(storage.size_bytes * _SMALL_STATE_SHARE))
        elif not _made_by_step(graph, storage):
            yield storage


def _no_state(graph: StepGraph) -> Iterator[Storage]:
    for storage in graph.storages:
        if storage.category != "optimizer_state" and not _made_by_step(graph, storage):
            yield storage


def _made_by_step(graph: StepGraph, storage: Storage) -> bool:
    return (
        storage.born >= 0 and storage.category == "temporary" and graph.ops[storage.born].phase == "optimizer"
    )


def _nothing(graph: StepGraph, seconds: Sequence[float], gpu: GPU) -> Cost:
    """The step's kernels move the same bytes; smaller ones are not counted on."""
    return Cost()


def _on_host(graph: StepGraph, seconds: Sequence[float], gpu: GPU) -> Cost:
    """Gradients go and weights come while nothing else runs, and the host steps in between."""
    trained = trained_bytes(graph)
    steps = trained / 4 * HOST_STEP_BYTES / HOST_BYTES_PER_SECOND
    return Cost(
        device_seconds=-phase_seconds(graph, seconds, "optimizer"),
        host_seconds=link_seconds(2 * trained, gpu) + steps,
        host_bytes=state_bytes(graph) + 2 * trained,
    )


IN_BACKWARD = LeverKind(
    name="optimizer step in the backward pass",
    axis="gradients",
    exactness="reordered",
    settings={"technique": "optimizer_in_backward"},
    storages=_stepped_in_backward,
    cost=_nothing,
    apart=("optimizer state in host memory",),
    whole_batch=True,
)
SMALL_STATE = LeverKind(
    name="8-bit optimizer state",
    axis="state",
    exactness="approximate",
    settings={"technique": "low_memory_optimizer"},
    storages=_small_state,
    cost=_nothing,
)
STATE_ON_HOST = LeverKind(
    name="optimizer state in host memory",
    axis="state",
    exactness="reordered",
    settings={"technique": "offloaded_optimizer_state"},
    storages=_no_state,
    cost=_on_host,
    apart=("optimizer step in the backward pass",),
)
