"""Levers on parameters: those of the blocks in host memory, on the device while their block runs."""

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
    exposed,
    link_seconds,
    phase_seconds,
)

_MOVED = ("parameter", "gradient", "optimizer_state")
_BLOCKS_THERE = 3
"""Blocks whose parameters are on the device at once: the one that runs, the next, and one that leaves."""


def _outside(graph: StepGraph) -> Iterator[Storage]:
    """What belongs to blocks is on the host, but for a few blocks' parameters."""
    blocks = _blocks(graph)
    sizes: dict[str, int] = {}
    for storage in graph.storages:
        block = _block_of(storage.name, blocks)
        if block is None or storage.category not in _MOVED:
            yield storage
        elif storage.category == "parameter":
            sizes[block] = sizes.get(block, 0) + storage.size_bytes
    there = sum(sorted(sizes.values(), reverse=True)[:_BLOCKS_THERE])
    if there:
        yield replace(graph.storages[0], size_bytes=there, category="parameter", born=-1, died=-1)


def _cost(graph: StepGraph, seconds: Sequence[float], gpu: GPU) -> Cost:
    """Parameters come twice and gradients go once, beside the operators; the host steps after them."""
    blocks = _blocks(graph)
    held = dict.fromkeys(_MOVED, 0)
    for storage in graph.storages:
        if storage.category in _MOVED and _block_of(storage.name, blocks) is not None:
            held[storage.category] += storage.size_bytes
    rounds = int(graph.meta.get("micro_batches", 1))
    moved = rounds * (2 * held["parameter"] + held["gradient"])
    steps = held["gradient"] / 4 * HOST_STEP_BYTES / HOST_BYTES_PER_SECOND
    beside = phase_seconds(graph, seconds, "forward", "backward")
    return Cost(
        host_seconds=exposed(link_seconds(moved, gpu), beside) + steps,
        host_bytes=sum(held.values()),
    )


def _blocks(graph: StepGraph) -> tuple[str, ...]:
    return tuple(f"{name}." for name in graph.meta.get("blocks", ()))


def _block_of(name: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if name.startswith(block)), None)


ON_HOST = LeverKind(
    name="blocks' parameters in host memory",
    axis="parameters",
    exactness="reordered",
    settings={"technique": "parameter_offload"},
    storages=_outside,
    cost=_cost,
    apart=("optimizer step in the backward pass", "8-bit optimizer state"),
)
