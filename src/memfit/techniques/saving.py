"""What a technique is expected to save on a captured step: the step's graph with other sizes and lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.capture.graph import StepGraph, Storage

MADE_BY_SAMPLES = frozenset({"activation", "temporary"})
"""Categories of storages whose size follows the number of samples (gradients and states follow the model)."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """An estimate for one step, in requested bytes: no rounding, no library workspaces. Negative: it costs.

    Attributes:
        peak_bytes: by how much the step's peak falls.
        resting_bytes: by how much falls what stays between steps (parameters, optimizer state).
        extra_flops: floating-point operations that the step does more.
        note: what the figures leave out, or why the technique does not help here.
    """

    peak_bytes: int
    resting_bytes: int = 0
    extra_flops: int = 0
    note: str = ""


def saving_of(
    graph: StepGraph,
    storages: Iterable[Storage],
    *,
    extra_flops: int = 0,
    extra_resting_bytes: int = 0,
    note: str = "",
) -> Saving:
    """The saving when the step holds ``storages`` in place of its own.

    Args:
        graph: the captured step.
        storages: those of the changed step; sizes and lives count, ids do not.
        extra_flops: see `Saving.extra_flops`.
        extra_resting_bytes: bytes that the technique itself keeps for the whole step.
        note: see `Saving.note`.
    """
    after = replace(graph, storages=tuple(storages))
    return Saving(
        peak_bytes=graph.peak_bytes - after.peak_bytes - extra_resting_bytes,
        resting_bytes=graph.resting_bytes - after.resting_bytes - extra_resting_bytes,
        extra_flops=extra_flops,
        note=note,
    )


def cut_into(graph: StepGraph, pieces: int) -> Iterator[Storage]:
    """The storages when the batch runs in ``pieces``: what follows the samples is a piece's size."""
    for storage in graph.storages:
        cut = storage.born >= 0 and storage.category in MADE_BY_SAMPLES
        cut = cut and graph.ops[storage.born].phase != "optimizer"
        yield replace(storage, size_bytes=-(-storage.size_bytes // pieces)) if cut else storage


def recomputed(graph: StepGraph, blocks: Iterable[str]) -> Iterator[Storage]:
    """The storages when ``blocks`` run again in the backward pass: what a block saves dies at its forward's
    end, and is there again when its backward begins."""
    ends = {block: _first_and_last(graph, block) for block in blocks}
    for storage in graph.storages:
        block = _block_of(graph.ops[storage.born].module, ends) if storage.saved else None
        forward_end, backward_start = ends[block] if block is not None else (-1, -1)
        if block is None or backward_start < 0 or _is_output(graph, storage, forward_end):
            yield storage
            continue
        yield replace(storage, died=max(forward_end, storage.born))
        yield replace(storage, born=max(backward_start, 0))


def _first_and_last(graph: StepGraph, block: str) -> tuple[int, int]:
    """Index of a block's last forward operator and of its first backward operator; -1 where there is none."""
    forward = [op.index for op in graph.under(block, ("forward",))]
    backward = [op.index for op in graph.under(block, ("backward",))]
    return (forward[-1] if forward else -1), (backward[0] if backward else -1)


def _block_of(module: str, blocks: Iterable[str]) -> str | None:
    return next((b for b in blocks if module == b or module.startswith(f"{b}.")), None)


def _is_output(graph: StepGraph, storage: Storage, forward_end: int) -> bool:
    """Read in the forward pass after its block: the next block's input."""
    later = (op for op in graph.ops[forward_end + 1 :] if op.phase == "forward")
    return any(storage.id in op.inputs for op in later)
