"""Reads the compiler's joint graph of forward and backward into a `JointStep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from memfit.capture.graph import Op
from memfit.capture.operators import OpCall, results_of
from memfit.techniques.joint_replay import BEFORE, BETWEEN, JointStep

UNKNOWN_SIZE = 4096
"""What stands for a size that only a run would tell."""


@dataclass(frozen=True, kw_only=True)
class ReadJoint:
    """A `JointStep`, and the graph's nodes behind it.

    ``holders[storage]`` is the node whose value is that storage as its operator made it.
    """

    step: JointStep
    nodes: tuple[fx.Node, ...]
    holders: Mapping[int, fx.Node]
    storages: Mapping[fx.Node, tuple[int, ...]]

    def storages_of(self, nodes: Sequence[fx.Node]) -> frozenset[int]:
        """The forward's storages that the values of ``nodes`` lie in."""
        return frozenset(s for node in nodes for s in self.storages.get(node, ()) if self.step.is_forward(s))


def read_joint(
    graph: fx.Graph,
    *,
    backward: frozenset[fx.Node],
    outputs: Sequence[Any],
    gradients: Sequence[Any],
) -> ReadJoint:
    """Reads a joint graph, whose nodes have fake values in ``meta["val"]``.

    Args:
        backward: nodes that run in the backward in any case.
        outputs: nodes that the forward returns; other values among them are passed over.
        gradients: the same for the backward.
    """
    with _disable_current_modes():  # the compiler's: what is made here must be real
        return _Reader(backward).read(graph, outputs, gradients)


class _Reader:
    """The storages seen so far, and concrete values that stand for the fake ones (same shapes, no sizes that
    are symbols, so that asking for bytes or FLOPs adds no guard)."""

    def __init__(self, backward: frozenset[fx.Node]) -> None:
        self._backward = backward
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._holders: dict[int, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._keep: list[Any] = []

    def read(self, graph: fx.Graph, outputs: Sequence[Any], gradients: Sequence[Any]) -> ReadJoint:
        for node in graph.nodes:
            if "val" in node.meta:
                self._values[node] = self._concrete(node.meta["val"])
        calls = [node for node in graph.nodes if node.op == "call_function"]
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._make(node, BETWEEN if "tangents" in str(node.target) else BEFORE)
        ops: list[Op] = []
        nodes: list[fx.Node] = []
        fixed: set[int] = set()
        for phase in ("forward", "backward"):
            for node in calls:
                if (node in self._backward) != (phase == "backward"):
                    continue
                op, can_repeat = self._op(node, len(ops), phase)
                if op is None:
                    continue
                if not can_repeat:
                    fixed.add(op.index)
                ops.append(op)
                nodes.append(node)
        step = JointStep(
            ops=tuple(ops),
            sizes_bytes=tuple(self._sizes),
            born=tuple(self._born),
            outputs=frozenset(self._numbers_of(outputs)),
            gradients=frozenset(self._numbers_of(gradients)),
            fixed=frozenset(fixed),
        )
        storages = {node: self._numbers_of([node]) for node in graph.nodes}
        return ReadJoint(step=step, nodes=tuple(nodes), holders=self._holders, storages=storages)

    def _op(self, node: fx.Node, index: int, phase: str) -> tuple[Op | None, bool]:
        """The operator of a node and whether it may run again; None where it makes nothing."""
        inputs = self._numbers_of(node.all_input_nodes)
        made = self._make(node, index)
        if not made and not isinstance(node.target, torch._ops.OpOverload):
            return None, True
        if not isinstance(node.target, torch._ops.OpOverload):
            return Op(index=index, name=str(node.target), phase=phase, inputs=inputs, outputs=made), False
        args = map_arg(node.args, self._values.get)
        kwargs = map_arg(node.kwargs, self._values.get)
        call = OpCall(node.target, args, kwargs, self._values.get(node))
        if not made and not call.written:
            return None, True
        flops, work, moved, dtype = call.work()
        op = Op(
            index=index,
            name=call.facts.name,
            phase=phase,
            inputs=inputs,
            outputs=made,
            random=call.is_random,
            flops=flops,
            work=work,
            bytes_moved=moved,
            dtype=dtype,
        )
        repeats = not (call.is_random or call.written or node.target.namespace not in _PURE)
        return op, repeats

    def _make(self, node: fx.Node, index: int) -> tuple[int, ...]:
        """The storages that are new with this node's value."""
        made = []
        for tensor in results_of(self._values.get(node)):
            key = tensor.untyped_storage()._cdata
            if key in self._numbers:
                number = self._numbers[key]
                if isinstance(self._values.get(self._holders[number]), list | tuple):
                    self._holders[number] = node  # the piece, not the tuple that it was in
                continue
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(tensor.untyped_storage().nbytes())
            self._born.append(index)
            self._holders[number] = node
            made.append(number)
        return tuple(made)

    def _numbers_of(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        """The storages behind nodes, each once."""
        found = dict.fromkeys(
            self._numbers[key]
            for node in nodes
            if isinstance(node, fx.Node)
            for tensor in results_of(self._values.get(node))
            if (key := tensor.untyped_storage()._cdata) in self._numbers
        )
        return tuple(found)

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._concrete_tensor(value)
        if isinstance(value, list | tuple):
            return [self._concrete(inner) for inner in value]
        return _hint(value)

    def _concrete_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return torch.empty(tuple(map(_hint, tensor.shape)), dtype=tensor.dtype, device="meta")
        fake = tensor.untyped_storage()
        storage = self._storages.get(fake._cdata)
        if storage is None:
            storage = torch.UntypedStorage(_hint(fake.nbytes()), device="meta")
            self._storages[fake._cdata] = storage
            self._keep.append(fake)  # its address must not be used again
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        size, stride = tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride()))
        return made.set_(storage, _hint(tensor.storage_offset()), size, stride)


_PURE = ("aten", "prims", "inductor_prims")
"""Namespaces whose operators can be run a second time, unless they draw or write."""


def _hint(value: Any) -> Any:
    """The number that a symbolic size had when the graph was traced."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        hint = value.node.hint
        return UNKNOWN_SIZE if hint is None else hint
    return value
