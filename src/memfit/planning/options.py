"""What a block could keep: all sets of its heavy operators' results, priced on the plain step's graph.

The price is analytic: kept are the results of the saved operators; run again is everything up to the last
operator whose result the block's backward reads (checkpointing stops there by itself), but for what is saved.
Prices prune the sets to a Pareto front; what is left is then measured in a captured step with the options in
place (see `memfit.planning.problems`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.capture.graph import Op, StepGraph
from memfit.planning.layout import Layout
from memfit.planning.problem import Option, pareto_options
from memfit.techniques.operation_kinds import HEAVY, kind_of

KINDS = kind_of(HEAVY)
"""Operators worth keeping, by name, and what the checkpointing technique calls their kind."""
_SOFTMAXES = ("_softmax", "_safe_softmax")
_PRODUCTS = ("bmm", "baddbmm")

MOST_SUBSETS_OF = 7
"""Blocks with more heavy operators than this try them in order of time per byte instead of all their subsets.
"""


@dataclass(frozen=True, kw_only=True)
class HeavyOp:
    """A forward operator that a block may keep the result of: ``name`` as the technique calls it
    (``"linear:0"``)."""

    name: str
    index: int
    saved_bytes: int
    seconds: float
    random: bool


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """The forward of one block, priced: what options are made of.

    ``seconds`` and ``flops`` are those of the operators that a full recomputation runs, heavy ones included.
    """

    heavy: tuple[HeavyOp, ...]
    seconds: float
    flops: float
    op_flops: dict[int, float]
    rest_bytes: int
    working_bytes: int

    def option(self, saves: Sequence[HeavyOp]) -> Option:
        """The option that keeps the results of ``saves``."""
        return Option(
            saves=tuple(op.name for op in sorted(saves, key=lambda op: op.index)),
            saved_bytes=self.rest_bytes + sum(op.saved_bytes for op in saves),
            working_bytes=self.working_bytes,
            recompute_seconds=max(self.seconds - sum(op.seconds for op in saves), 0.0),
            recompute_flops=max(self.flops - sum(self.op_flops[op.index] for op in saves), 0.0),
        )


def block_work(layout: Layout, block: int, seconds: Sequence[float]) -> BlockWork:
    """Prices the forward of ``block`` in a plain step; ``seconds`` are those of each operator."""
    forward = layout.ops(block, "forward")
    again = _run_again(layout.graph, forward, layout.ops(block, "backward"))
    output = _result_bytes(layout.graph, forward)
    return BlockWork(
        heavy=_heavy_ops(layout.graph, forward, again, seconds),
        seconds=sum(seconds[op.index] for op in again),
        flops=float(sum(op.flops for op in again)),
        op_flops={op.index: float(op.flops) for op in forward},
        rest_bytes=output,
        working_bytes=layout.kept_bytes[block],
    )


def _run_again(graph: StepGraph, forward: Sequence[Op], backward: Sequence[Op]) -> tuple[Op, ...]:
    """The operators that a full recomputation runs: up to the last one whose result the block's backward
    reads."""
    read = {storage for op in backward if not op.is_view for storage in op.inputs}
    made_read = [
        position
        for position, op in enumerate(forward)
        if any(graph.storages[s].born == op.index and s in read for s in op.outputs)
        or any(s in read for s in op.mutates)
    ]
    return tuple(forward[: max(made_read, default=-1) + 1])


def _result_bytes(graph: StepGraph, forward: Sequence[Op]) -> int:
    """The block's own result, which stays for the next block whatever this one keeps: made last, and still
    there."""
    for op in reversed(forward):
        made = [s for s in op.outputs if graph.storages[s].saved and graph.storages[s].born == op.index]
        if made and not op.random:
            return graph.storages[made[0]].size_bytes
    return 0


def _heavy_ops(
    graph: StepGraph, forward: Sequence[Op], again: Sequence[Op], seconds: Sequence[float]
) -> tuple[HeavyOp, ...]:
    """The operators that can be saved, named by kind and ordinal; those that are never run again are left
    out."""
    run_again = {op.index for op in again}
    heavy = []
    for op, name in save_names(forward):
        if op.index in run_again:
            made = sum(graph.storages[s].size_bytes for s in op.outputs if graph.storages[s].born == op.index)
            heavy.append(
                HeavyOp(
                    name=name, index=op.index, saved_bytes=made, seconds=seconds[op.index], random=op.random
                )
            )
    return tuple(heavy)


def save_names(forward: Sequence[Op]) -> list[tuple[Op, str]]:
    """The heavy and the random operators of a block's forward with the names that the technique saves them
    by.

    Ordinals count per kind. A batched product after a softmax is attention; attention that draws (dropout in
    it) counts among the random ones too, and goes by its first name.
    """
    counts: Counter[str] = Counter()
    named = []
    after_softmax = False
    for op in forward:
        base = op.name.split(".")[1] if "." in op.name else op.name
        kind = KINDS.get(base)
        if base in _SOFTMAXES:
            after_softmax = True
        elif base in _PRODUCTS and after_softmax:
            kind, after_softmax = "attention", False
        kinds = [k for k in (kind, "random" if op.random else None) if k is not None]
        if kinds:
            named.append((op, f"{kinds[0]}:{counts[kinds[0]]}"))
        counts.update(kinds)
    return named


def enumerate_options(work: BlockWork, *, limit: int = 14) -> tuple[Option, ...]:
    """The Pareto front of the block's save-sets by price, the full recomputation always among them."""
    full = work.option(())
    front = pareto_options([full, *(work.option(saves) for saves in _subsets(work.heavy))], limit=limit)
    return front if full in front else (full, *front)


def _subsets(ops: Sequence[HeavyOp]) -> list[tuple[HeavyOp, ...]]:
    """All subsets of a few operators; of many, those of the best in time saved per byte, on top of each
    other."""
    ranked = sorted(ops, key=lambda op: (-op.seconds / max(op.saved_bytes, 1), op.index))
    few = ranked[:MOST_SUBSETS_OF]
    subsets = [chosen for size in range(len(few) + 1) for chosen in itertools.combinations(few, size)]
    return subsets + [tuple(ranked[:count]) for count in range(len(few) + 1, len(ranked) + 1)]
