"""The compiler's partitioner with another choice of what is kept: torch's own by its budget, or the cut of
least time under a peak.

Everything else of the partition is PyTorch's (symbols, effects, random state, the order of the backward): its
function is run with the one that chooses replaced. Where there is nothing to choose on (a graph whose own
checkpointing already says what is kept, one without a backward), PyTorch's choice stays.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memfit.capture.costs import LAUNCH_SECONDS, op_class, roofline_seconds
from memfit.capture.graph import Op
from memfit.core.devices import GPU, find_gpu
from memfit.techniques.joint_replay import FUSED_CLASSES, JointStep, Replay, replay
from memfit.techniques.joint_solver import Cut, choose, keep_all, least
from memfit.techniques.joint_step import ReadJoint, read_joint

FUSED_SHARE = 0.25
"""What running again an operator that the compiler fuses with its neighbours costs, in parts of running it
alone: most of what it reads and writes stays on the chip, and it has no launch of its own."""

KNOWN_BUDGETS = (1.0, 0.9, 0.75, 0.5, 0.4, 0.25, 0.1, 0.0)
"""PyTorch's cuts that a cut for a peak is held against: it is no worse than the best of those that fit."""

_LOCK = threading.RLock()


@cache
def _sources() -> str:
    """Of the code that makes cuts: what another version of it cached is not taken."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("joint_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """One graph that was cut: what was read, what is kept, and what that runs and holds in thought.

    ``reached`` is False where no cut as lean as asked for was found, and the leanest is used. ``by_budget``
    has what PyTorch would keep for each budget that the observation asks for.
    """

    step: JointStep
    kept: frozenset[int]
    replay: Replay
    plain_peak_bytes: int
    reached: bool = True
    by_budget: Mapping[float, frozenset[int]] = field(default_factory=dict)


class Observation:
    """The graphs that were cut while it lasts; and PyTorch's choice for each of ``budgets``."""

    def __init__(self, budgets: Sequence[float]) -> None:
        self.budgets = tuple(budgets)
        self.graphs: list[Partitioned] = []


_OBSERVATIONS: list[Observation] = []


@contextmanager
def observed_partitions(budgets: Sequence[float] = ()) -> Iterator[Observation]:
    """Tells of the graphs that are cut while this lasts. The compiler's cache of cut graphs is not used
    meanwhile: what it has is not cut again."""
    observation = Observation(budgets)
    _OBSERVATIONS.append(observation)
    try:
        with functorch_config.patch(enable_autograd_cache=False):
            yield observation
    finally:
        _OBSERVATIONS.remove(observation)


class PeakPartitioner(CustomPartitionerFn):
    """Cuts joint graphs; what ``torch.compile``'s back-ends take as their partitioner.

    Args:
        peak: the most live bytes, as a share of those that keeping everything needs; None: PyTorch's
            choice, by ``torch._functorch.config.activation_memory_budget``.
        gpu: whose rates the seconds of operators go by; its name, as the compiler copies its settings.
        fused: whether the back-end fuses pointwise operators.
    """

    def __init__(self, peak: float | None, gpu: str, *, fused: bool) -> None:
        self.peak, self.gpu, self.fused = peak, gpu, fused

    def uuid(self) -> Any:
        """For the compiler's caches: equal for equal cuts."""
        return f"memfit-{_sources()}-{self.peak}-{self.gpu}-{self.fused}"

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """PyTorch's partition of ``gm``, with this choice."""
        with _chosen_by(lambda own, graph, info, budget: self._choose(own, gm, graph, info, budget, kwargs)):
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def _choose(
        self, own: Any, gm: fx.GraphModule, graph: fx.Graph, info: Any, budget: float, kwargs: Any
    ) -> list[fx.Node]:
        if partitioners.has_recomputable_ops(gm):
            return list(own(graph, info, budget))
        outputs, gradients, *_ = partitioners._extract_fwd_bwd_outputs(
            gm, num_fwd_outputs=kwargs["num_fwd_outputs"]
        )
        read = read_joint(
            graph, backward=frozenset(info.required_bw_nodes), outputs=outputs, gradients=gradients
        )
        asked = {other for observation in _OBSERVATIONS for other in observation.budgets}
        asked.update(() if self.peak is None else KNOWN_BUDGETS)
        by_budget = {other: _kept_by(own, graph, info, other, read)[0] for other in sorted(asked)}
        if self.peak is None:
            kept, nodes = _kept_by(own, graph, info, budget, read)
            reached = True
        else:
            cut, reached = self._cut(read.step, [by_budget[known] for known in KNOWN_BUDGETS])
            kept, nodes = cut.kept, [*info.inputs, *_saved_nodes(read, cut.kept, info)]
        _tell(read.step, kept, reached, by_budget)
        return nodes

    def _cut(self, step: JointStep, known: Sequence[frozenset[int]]) -> tuple[Cut, bool]:
        assert self.peak is not None
        gpu = find_gpu(self.gpu)
        seconds = [cost_seconds(op, gpu, fused=self.fused) for op in step.ops]
        whole = replay(step, keep_all(step))
        cut = choose(step, seconds, int(self.peak * whole.peak_bytes), known)
        return (least(step, seconds, known), False) if cut is None else (cut, True)


def _kept_by(
    own: Any, graph: fx.Graph, info: Any, budget: float, read: ReadJoint
) -> tuple[frozenset[int], list[fx.Node]]:
    """PyTorch's choice, and what is drawn beside it: attention with dropout it would run again, and draw
    anew."""
    nodes = list(own(graph, info, budget))
    kept = read.storages_of(nodes)
    missing = read.step.drawn_again(kept)
    return kept | missing, [*nodes, *_saved_nodes(read, missing, info)] if missing else nodes


def _tell(
    step: JointStep, kept: frozenset[int], reached: bool, by_budget: Mapping[float, frozenset[int]]
) -> None:
    if not _OBSERVATIONS:
        return
    cut = Partitioned(
        step=step,
        kept=kept,
        replay=replay(step, kept),
        plain_peak_bytes=replay(step, keep_all(step)).peak_bytes,
        reached=reached,
        by_budget=by_budget,
    )
    for observation in _OBSERVATIONS:
        observation.graphs.append(cut)


def cost_seconds(op: Op, gpu: GPU, *, fused: bool) -> float:
    """What running an operator again is taken to cost."""
    seconds = roofline_seconds(op.name, round(op.flops * op.work), op.bytes_moved, op.dtype, gpu)
    if not fused or op_class(op.name).name not in FUSED_CLASSES:
        return seconds
    return FUSED_SHARE * (0.0 if seconds <= LAUNCH_SECONDS else seconds)


def _saved_nodes(read: ReadJoint, kept: frozenset[int], info: Any) -> list[fx.Node]:
    """The nodes of kept storages, and the symbols that sizes are made of."""
    nodes = [read.holders[storage] for storage in sorted(kept)]
    symbols = [
        node
        for node in info.required_fw_nodes
        if node.op != "placeholder"
        and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    ]
    return [*nodes, *symbols]


@contextmanager
def _chosen_by(choice: Callable[[Any, fx.Graph, Any, float], list[fx.Node]]) -> Iterator[None]:
    """PyTorch's partitioner asks ``choice``, which gets its own function first, for as long as this lasts."""
    with _LOCK:
        own = partitioners.choose_saved_values_set

        def chosen(joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
            return choice(own, joint_graph, node_info, memory_budget)

        partitioners.choose_saved_values_set = chosen
        try:
            yield
        finally:
            partitioners.choose_saved_values_set = own
