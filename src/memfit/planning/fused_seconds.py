"""The predicted time of a compiled step: pointwise operators are fused with their neighbours, and cost what
goes in and out of each group.

A group is what is connected among operators of one pass that can be fused, with the same number of heavy
operators before them on the longest way: so no way leads out of a group and back into it. A group reads each
storage from outside once, and writes what others read; it is launched once. Heavy operators (products,
convolutions, attention, gathers) cost what they cost alone. Fusion into products' epilogues is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memfit.capture.costs import LAUNCH_SECONDS, op_class, roofline_seconds
from memfit.capture.graph import Op
from memfit.core.devices import GPU
from memfit.techniques.joint_replay import FUSED_CLASSES, JointStep, Replay

BANDWIDTH_SHARE = 0.8


@dataclass(kw_only=True)
class _Group:
    """Operators that run as one: what they make, and what they read from outside."""

    made: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    def join(self, other: _Group) -> None:
        self.made |= other.made
        self.read |= other.read


def fused_seconds(step: JointStep, run: Replay, gpu: GPU) -> float:
    """Predicted seconds of forward and backward of a cut, compiled."""
    turn = step.forward_count
    forward = _pass_seconds(step, run.order[:turn], gpu, step.outputs | run.kept)
    return forward + _pass_seconds(step, run.order[turn:], gpu, step.gradients)


def unfused_seconds(step: JointStep, run: Replay, gpu: GPU) -> float:
    """The same where each operator runs alone."""
    return sum(_alone(step.ops[number], gpu) for number in run.order)


def _alone(op: Op, gpu: GPU) -> float:
    return roofline_seconds(op.name, round(op.flops * op.work), op.bytes_moved, op.dtype, gpu)


def _pass_seconds(step: JointStep, order: Sequence[int], gpu: GPU, results: frozenset[int]) -> float:
    """One pass, of which ``results`` are left: heavy operators one by one, and groups of the others."""
    total = 0.0
    heavy_before: dict[int, int] = {}
    group_of: dict[int, _Group] = {}
    heavy_reads: set[int] = set()
    for number in order:
        op = step.ops[number]
        level = max((heavy_before.get(s, 0) for s in op.inputs), default=0)
        fused = op_class(op.name).name in FUSED_CLASSES
        heavy_before.update(dict.fromkeys(op.outputs, level if fused else level + 1))
        if not fused:
            total += _alone(op, gpu)
            heavy_reads.update(op.inputs)
        elif op.bytes_moved:
            _add(group_of, op, {s for s in op.inputs if s in group_of and heavy_before.get(s, 0) == level})
    groups = list({id(group): group for group in group_of.values()}.values())
    read_outside = heavy_reads.union(*(group.read for group in groups))
    for group in groups:
        written = {s for s in group.made if s in read_outside or s in results}
        moved = sum(step.sizes_bytes[s] for s in (group.read | written))
        total += max(moved / (gpu.bandwidth_bytes_per_second * BANDWIDTH_SHARE), LAUNCH_SECONDS)
    return total


def _add(group_of: dict[int, _Group], op: Op, joined: set[int]) -> None:
    """Puts an operator into one group with the makers of ``joined``."""
    group = _Group(made=set(op.outputs), read=set(op.inputs))
    for other in {id(group_of[s]): group_of[s] for s in joined}.values():
        group.join(other)
    group.read -= group.made
    group_of.update(dict.fromkeys(group.made, group))
