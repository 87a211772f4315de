"""Where the blocks lie in a captured step: which operators are theirs, what they keep, what else is there and
when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memfit.capture.graph import Op, StepGraph

TURN = -1
"""Stands for the part of the backward pass that comes before any block's: the loss and the output layer."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A captured step seen as a row of blocks.

    Args:
        graph: the step.
        blocks: names of the blocks, in the order in which the forward pass meets them.
        passes: how many forward–backward rounds the step has (micro-batches).
    """

    graph: StepGraph
    blocks: tuple[str, ...]
    passes: int = 1

    @cached_property
    def _owner(self) -> list[int | None]:
        """For each operator the number of the block whose module it is in."""
        number = {name: n for n, name in enumerate(self.blocks)}
        found: dict[str, int | None] = {}
        for op in self.graph.ops:
            if op.module not in found:
                found[op.module] = _enclosing(op.module, number)
        return [found[op.module] for op in self.graph.ops]

    def ops(self, block: int, phase: str) -> tuple[Op, ...]:
        """The operators of one block in one phase, in order."""
        return tuple(op for op in self._by_block[block] if op.phase == phase)

    @cached_property
    def _by_block(self) -> dict[int, list[Op]]:
        groups: dict[int, list[Op]] = defaultdict(list)
        for op, owner in zip(self.graph.ops, self._owner, strict=True):
            if owner is not None:
                groups[owner].append(op)
        return groups

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """What each block's forward leaves for the backward pass, in one round."""
        total = [0] * len(self.blocks)
        for storage in self.graph.storages:
            if storage.saved and storage.born >= 0:
                owner = self._owner[storage.born]
                if owner is not None:
                    total[owner] += storage.size_bytes
        return tuple(-(-count // self.passes) for count in total)

    @cached_property
    def stretches(self) -> list[int | None]:
        """For each operator the block whose backward is going on: a number, `TURN`, or None outside of the
        backward.

        Operators between two blocks' backward (or after the first block's) count to the one before them.
        """
        at: list[int | None] = []
        current: int | None = None
        for op, owner in zip(self.graph.ops, self._owner, strict=True):
            if op.phase in ("forward", "optimizer", "other"):
                current = None
            elif op.phase == "backward" or owner is not None or current is None:
                current = owner if owner is not None else (TURN if current is None else current)
            at.append(current)
        return at

    @cached_property
    def peaks(self) -> dict[int, int]:
        """Most bytes live during each stretch of the backward pass; `TURN` includes the forward pass before
        it."""
        live = self.graph.live_bytes
        peaks: dict[int, int] = {}
        for index, stretch in enumerate(self.stretches):
            if stretch is None and self.graph.ops[index].phase == "forward":
                stretch = TURN
            if stretch is not None:
                peaks[stretch] = max(peaks.get(stretch, 0), int(live[index]))
        return peaks

    @cached_property
    def optimizer_peak_bytes(self) -> int:
        """Most bytes live in the optimizer step."""
        live = self.graph.live_bytes
        return max((int(live[op.index]) for op in self.graph.ops if op.phase == "optimizer"), default=0)

    def recompute_seconds(self, block: int, seconds: Sequence[float]) -> float:
        """Seconds that running parts of ``block`` again takes."""
        return sum(seconds[op.index] for op in self.ops(block, "recompute"))

    def recompute_flops(self, block: int) -> float:
        """FLOPs that running parts of ``block`` again takes."""
        return float(sum(op.flops for op in self.ops(block, "recompute")))

    def signature(self, block: int) -> tuple[tuple[str, int, int], ...]:
        """What makes two blocks alike: the operators of their forward, with FLOPs and bytes."""
        return tuple((op.name, op.flops, op.bytes_moved) for op in self.ops(block, "forward"))

    def kept_before(self) -> tuple[int, ...]:
        """For each block what the blocks before it keep together."""
        sums = np.concatenate([[0], np.cumsum(self.kept_bytes)]) if self.blocks else np.zeros(1)
        return tuple(int(value) for value in sums[:-1])


def ordered_blocks(graph: StepGraph, names: Sequence[str]) -> tuple[str, ...]:
    """The blocks among ``names`` that the step's forward runs, in the order in which it first meets them."""
    number = {name: n for n, name in enumerate(names)}
    seen: dict[str, None] = {}
    for op in graph.ops:
        if op.phase == "forward":
            owner = _enclosing(op.module, number)
            if owner is not None:
                seen.setdefault(names[owner])
    return tuple(seen)


def _enclosing(module: str, number: dict[str, int]) -> int | None:
    """The block that ``module`` is or lies in."""
    name = module
    while name:
        if name in number:
            return number[name]
        name = name.rpartition(".")[0]
    return None
