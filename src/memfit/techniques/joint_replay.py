"""A compiled step before it is cut into forward and backward, and what any cut of it would hold and run
again.

The compiler traces forward and backward of a model as one graph of pure operators. Cutting it means to choose
which results of the forward are kept; whatever else the backward reads is made again, once, right before it
is first read (so does PyTorch's partitioner order it). Pure values, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture.graph import Op

FUSED_CLASSES = ("elementwise", "copy", "normalization", "reduction")
"""Classes of operators (`memfit.capture.costs`) that a compiler fuses with their neighbours."""
BEFORE = -1
"""Born before the step: parameters, buffers, the batch."""
BETWEEN = -2
"""Born between forward and backward: the gradients of the forward's results."""


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Forward and backward of one compiled graph.

    Attributes:
        ops: all operators but views, forward first, then backward, each in the order of execution.
        sizes_bytes: of each storage.
        born: the operator that makes each storage, or `BEFORE`, or `BETWEEN`.
        outputs: storages that the forward gives to its caller.
        gradients: storages that outlive the backward.
        fixed: operators that cannot be run again: they draw, communicate, or have effects.
    """

    ops: tuple[Op, ...]
    sizes_bytes: tuple[int, ...]
    born: tuple[int, ...]
    outputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()

    @cached_property
    def forward_count(self) -> int:
        """How many of the operators are the forward's."""
        return sum(op.phase == "forward" for op in self.ops)

    @cached_property
    def needed(self) -> frozenset[int]:
        """Storages made by the forward that the backward reads."""
        return frozenset(
            storage
            for op in self.ops[self.forward_count :]
            for storage in op.inputs
            if 0 <= self.born[storage] < self.forward_count
        )

    def drawn_again(self, kept: frozenset[int]) -> frozenset[int]:
        """Storages that a cut which keeps ``kept`` would have to make again though their operators cannot run
        again: they must be kept too."""
        missing: set[int] = set()
        waiting = sorted(self.needed - kept)
        seen = set(waiting)
        while waiting:
            storage = waiting.pop()
            maker = self.born[storage]
            if maker in self.fixed:
                missing.add(storage)
                continue
            inputs = self.ops[maker].inputs
            fresh = [s for s in inputs if self.is_forward(s) and s not in kept and s not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        return frozenset(missing)

    def is_forward(self, storage: int) -> bool:
        """Whether the forward makes it."""
        return 0 <= self.born[storage] < self.forward_count


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a cut runs and holds.

    Attributes:
        order: numbers of operators as they run, forward, then backward with what is run again in between.
        kept: the storages that the cut keeps.
        again: the operators that run a second time, in the order of the step.
        live_bytes: alive while each one runs, its results included; what was there before is not counted.
        kept_bytes: alive between forward and backward.
    """

    order: tuple[int, ...]
    kept: frozenset[int]
    again: tuple[int, ...]
    live_bytes: npt.NDArray[np.int64]
    kept_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, without what was there before."""
        return int(self.live_bytes.max(initial=0))


def replay(step: JointStep, kept: Iterable[int]) -> Replay:
    """Runs the cut that keeps ``kept`` of the forward's storages, in thought.

    Raises ValueError where something that cannot run again would have to.
    """
    kept = frozenset(kept)
    forward = list(range(step.forward_count))
    backward, again = _backward(step, kept)
    order = forward + backward
    change = np.zeros(len(order) + 1, np.int64)
    turn = len(forward)
    last_forward, first_backward, last_backward = _uses(step, order, turn)
    kept_bytes = 0
    for storage, size in enumerate(step.sizes_bytes):
        begin, end = step.born[storage], last_backward.get(storage, -1)
        if begin == BEFORE:
            continue
        if step.is_forward(storage):
            if storage in kept and end >= 0:
                change[begin] += size
                change[end + 1] -= size
                kept_bytes += size
                continue
            change[begin] += size
            change[(turn - 1 if storage in step.outputs else last_forward.get(storage, begin)) + 1] -= size
        if storage in first_backward:
            end = len(order) - 1 if storage in step.gradients else end
            change[turn if begin == BETWEEN else first_backward[storage]] += size
            change[end + 1] -= size
    return Replay(
        order=tuple(order),
        kept=kept,
        again=tuple(sorted(again)),
        live_bytes=np.cumsum(change)[: len(order)],
        kept_bytes=kept_bytes,
    )


def _backward(step: JointStep, kept: frozenset[int]) -> tuple[list[int], set[int]]:
    """The backward's operators, each run again right before it is first needed; and which those are."""
    there = set(kept)
    order: list[int] = []
    again: set[int] = set()
    for number in range(step.forward_count, len(step.ops)):
        missing = [s for s in step.ops[number].inputs if step.is_forward(s) and s not in there]
        if missing:
            rerun = _makers(step, missing, there)
            order += rerun
            again.update(rerun)
            there.update(s for n in rerun for s in step.ops[n].outputs)
        order.append(number)
    return order, again


def _makers(step: JointStep, missing: Sequence[int], there: set[int]) -> list[int]:
    """What must run so that ``missing`` is there, in order."""
    makers: set[int] = set()
    waiting = list(missing)
    while waiting:
        maker = step.born[waiting.pop()]
        if maker in makers:
            continue
        if maker in step.fixed:
            raise ValueError(f"{step.ops[maker].name} cannot be run again, and its result is not kept")
        makers.add(maker)
        waiting += [s for s in step.ops[maker].inputs if step.is_forward(s) and s not in there]
    return sorted(makers)


def _uses(
    step: JointStep, order: Sequence[int], turn: int
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """For each storage its last use in the forward, its first and its last use (or making) in the
    backward."""
    last_forward: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, number in enumerate(order):
        op = step.ops[number]
        for storage in (*op.inputs, *op.outputs):
            if place < turn:
                last_forward[storage] = place
            else:
                first.setdefault(storage, place)
                last[storage] = place
    return last_forward, first, last
