"""A certified lower bound on recomputation: what any schedule of the traced step must spend to stay under a
peak.

The schedules meant are all that run the traced graph: each forward operator once up to the loss, then the
traced backward operators in their order, with any forward operators run again in between, as often and in
whatever grouping. Look at one moment of such a schedule, just before a backward operator ``t`` runs. Every
forward storage that ``t`` or a later backward operator reads is either held at that moment, or will be made
again after it; what is made again needs its own inputs held or made again. With ``s`` (held) and ``r``
(operator run again) in {0, 1}:

    s_v + r_op ≥ 1        for each needed storage v and each operator that writes it
    r_op ≤ s_u + r_op'    for each input u of a repeated operator and each op' that writes u
    Σ size_v s_v ≤ peak − (what else is certainly there at t)
    minimise Σ cost_op r_op

What else is certainly there: what was there before the step and outlives it, what backward operators made
and later ones still read, and the results and temporaries of ``t``. Every moment gives a valid bound, so the
largest over a few moments is one. Relaxing the integers only lowers it: all moments are solved relaxed, the
best one then as it is, and the solver's dual bound is what is returned, never its incumbent. Where that
leaves much open, moments are taken together (`memfit.planning.joint_bound`). Sources: the turning-point
program of our own study; Jain et al., Checkmate (MLSys 2020) for the recurrence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import coo_array

from memfit.capture.graph import Op, StepGraph
from memfit.planning.highs import minimise
from memfit.planning.joint_bound import TracedStep, joint_bound

MOMENTS = 6
MOST_NODES = 100
TIME_LIMIT_SECONDS = 20.0
NEAR_SHARE = 0.002
"""Bounds as near as this to a known schedule, in shares of the step, are not worth more time."""
_SLACK = 1e-6
"""The solver's own tolerance, given back so that rounding can never lift the bound over the truth."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """``cost`` is in the unit of the costs given; ``feasible`` is False where no schedule at all has such a
    peak."""

    cost: float
    feasible: bool = True


def lower_bound(
    graph: StepGraph,
    costs: Sequence[float],
    peak_bytes: int,
    *,
    moments: int = MOMENTS,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    lives: Mapping[int, int] | None = None,
    known_cost: float | None = None,
) -> Bound:
    """The least cost of operators run again, in any schedule of ``graph`` whose live bytes never exceed
    ``peak_bytes``.

    Args:
        graph: the plain step, without any recomputation in it, one batch in one piece.
        costs: what each operator costs (seconds or FLOPs), by index.
        peak_bytes: live bytes as requested; a budget on reserved bytes may be given too, as live ≤ reserved.
        moments: how many moments of the backward pass are looked at.
        time_limit_seconds: for each moment; when it is reached, the bound proven so far counts.
        lives: until which forward operator Python holds some storages, whatever is kept (see
            `memfit.techniques.dropped_lives`): the bound is then that of schedules that run the model's own
            code.
        known_cost: of a schedule that is known. Where single moments certify less by more than `NEAR_SHARE`
            of the whole step, several are taken together, which takes longer.
    """
    alone = lower_bounds(graph, costs, [peak_bytes], moments=moments, time_limit_seconds=time_limit_seconds)[
        0
    ]
    enough = 0.0 if known_cost is None else known_cost - NEAR_SHARE * sum(costs)
    if not alone.feasible or alone.cost >= enough:
        return alone
    step = TracedStep(
        graph=graph,
        costs=costs,
        forward=_forward_storages(graph),
        writers=_writers(graph),
        lives=dict(lives or {}),
    )
    together = joint_bound(step, peak_bytes, at_least=enough, time_limit_seconds=time_limit_seconds)
    return Bound(cost=max(alone.cost, together), feasible=together != float("inf"))


def lower_bounds(
    graph: StepGraph,
    costs: Sequence[float],
    peaks_bytes: Sequence[int],
    *,
    moments: int = MOMENTS,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> list[Bound]:
    """`lower_bound` at several peaks: the programs are read from the graph once."""
    programs = [_Program.at(graph, costs, moment) for moment in _moments(graph, moments)]
    return [_worst_moment(programs, peak, time_limit_seconds) for peak in peaks_bytes]


def _worst_moment(programs: Sequence[_Program], peak_bytes: int, time_limit_seconds: float) -> Bound:
    """The largest bound of all moments at one peak."""
    relaxed = [
        program.solve(peak_bytes, integral=False, time_limit_seconds=time_limit_seconds)
        for program in programs
    ]
    if not all(bound.feasible for bound in relaxed):
        return Bound(cost=float("inf"), feasible=False)
    if not any(bound.cost > 0 for bound in relaxed):
        return Bound(cost=0.0)
    best = max(range(len(programs)), key=lambda number: relaxed[number].cost)
    exact = programs[best].solve(peak_bytes, integral=True, time_limit_seconds=time_limit_seconds)
    return exact if exact.cost > relaxed[best].cost else relaxed[best]


def _moments(graph: StepGraph, count: int) -> list[int]:
    """Backward operators to look at: of each of ``count`` equal stretches the one where the plain step holds
    most."""
    backward = [op.index for op in graph.ops if op.phase == "backward" and not op.is_view]
    live = graph.live_bytes
    stretches = np.array_split(np.array(backward, dtype=int), min(count, len(backward)) or 1)
    return [int(stretch[np.argmax(live[stretch])]) for stretch in stretches if stretch.size]


@dataclass(frozen=True)
class _Program:
    """The program of one moment, before the peak is known. Storages and operators are renumbered densely."""

    operators: tuple[int, ...]
    storages: tuple[int, ...]
    sizes: npt.NDArray[np.float64]
    costs: npt.NDArray[np.float64]
    needed: tuple[tuple[int, int], ...]
    held: frozenset[int]
    reads: tuple[tuple[int, int, int], ...]
    certain_bytes: int

    @classmethod
    def at(cls, graph: StepGraph, costs: Sequence[float], moment: int) -> _Program:
        """Reads the graph at backward operator ``moment``."""
        writers = _writers(graph)
        forward = _forward_storages(graph)
        needed, held = _needed(graph, forward, moment)
        operators, storages = _closure(graph, needed, writers, forward)
        op_number = {op: n for n, op in enumerate(operators)}
        number = {storage: n for n, storage in enumerate(storages)}
        return cls(
            operators=operators,
            storages=storages,
            sizes=np.array([graph.storages[s].size_bytes for s in storages], dtype=float),
            costs=np.array([float(costs[op]) for op in operators]),
            needed=tuple((number[s], op_number[op]) for s in sorted(needed) for op in writers[s]),
            held=frozenset(number[s] for s in held),
            reads=tuple(
                (op_number[op], number[storage], op_number[maker])
                for op in operators
                for storage in _foreign_inputs(graph.ops[op], forward)
                for maker in writers[storage]
                if maker < op
            ),
            certain_bytes=_certain_bytes(graph, forward, moment),
        )

    def solve(self, peak_bytes: int, *, integral: bool, time_limit_seconds: float) -> Bound:
        """The bound of this moment at ``peak_bytes``: of the program itself, or of its linear relaxation."""
        room = (peak_bytes - self.certain_bytes) / 2**20
        lowest = sum(self.sizes[storage] for storage in self.held) / 2**20
        if room < lowest:
            return Bound(cost=float("inf"), feasible=False)
        if not self.storages or room >= self.sizes.sum() / 2**20:
            return Bound(cost=0.0)
        scale = float(self.costs.max(initial=0.0)) or 1.0
        width = len(self.storages) + len(self.operators)
        low = np.zeros(width)
        low[list(self.held)] = 1.0
        result = minimise(
            np.concatenate([np.zeros(len(self.storages)), self.costs / scale]),
            constraint=self._constraint(room),
            bounds=Bounds(low, 1.0),
            integral=integral,
            options={"mip_rel_gap": 0.005, "node_limit": MOST_NODES, "time_limit": time_limit_seconds},
        )
        if result.status == 2:
            return Bound(cost=float("inf"), feasible=False)
        proven = result.mip_dual_bound if integral else result.fun
        if proven is None or not np.isfinite(proven):
            return Bound(cost=0.0)
        return Bound(cost=max(float(proven) * (1 - _SLACK) - _SLACK, 0.0) * scale)

    def _constraint(self, room_mib: float) -> LinearConstraint:
        offset, shape = (
            len(self.storages),
            (len(self.needed) + len(self.reads) + 1, len(self.storages) + len(self.operators)),
        )
        values: list[float] = []
        rows: list[int] = []
        columns: list[int] = []
        low = np.zeros(shape[0])
        high = np.full(shape[0], np.inf)
        for row, (storage, operator) in enumerate(self.needed):
            values += [1.0, 1.0]
            rows += [row, row]
            columns += [storage, offset + operator]
            low[row] = 1.0
        for row, (operator, storage, maker) in enumerate(self.reads, start=len(self.needed)):
            values += [1.0, 1.0, -1.0]
            rows += [row, row, row]
            columns += [storage, offset + maker, offset + operator]
        last = shape[0] - 1
        values += list(self.sizes / 2**20)
        rows += [last] * len(self.storages)
        columns += list(range(len(self.storages)))
        low[last], high[last] = -np.inf, room_mib
        return LinearConstraint(coo_array((values, (rows, columns)), shape=shape).tocsr(), low, high)


def _forward_storages(graph: StepGraph) -> frozenset[int]:
    """Storages that forward operators make."""
    return frozenset(s.id for s in graph.storages if s.born >= 0 and graph.ops[s.born].phase == "forward")


def _writers(graph: StepGraph) -> dict[int, tuple[int, ...]]:
    """For each storage the forward operators that fill it: the one that made it and those that write it in
    place."""
    writers: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.phase != "forward":
            continue
        made = [s for s in op.outputs if graph.storages[s].born == op.index]
        for storage in dict.fromkeys((*made, *op.mutates)):
            writers[storage].append(op.index)
    return {storage: tuple(ops) for storage, ops in writers.items()}


def _foreign_inputs(op: Op, forward: frozenset[int]) -> list[int]:
    """The forward storages that a repeated operator must find; what it writes itself is not among them."""
    return [storage for storage in op.inputs if storage in forward and storage not in op.mutates]


def _needed(graph: StepGraph, forward: frozenset[int], moment: int) -> tuple[set[int], set[int]]:
    """Forward storages that backward operators read from ``moment`` on, and those that ``moment`` itself
    reads."""
    needed: set[int] = set()
    for op in graph.ops[moment:]:
        if op.phase == "backward" and not op.is_view:
            needed.update(storage for storage in op.inputs if storage in forward)
    return needed, {storage for storage in graph.ops[moment].inputs if storage in forward}


def _closure(
    graph: StepGraph, needed: set[int], writers: dict[int, tuple[int, ...]], forward: frozenset[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Operators and storages that making the needed ones again can involve."""
    storages = set(needed)
    operators: set[int] = set()
    waiting = sorted(needed)
    while waiting:
        for op in writers[waiting.pop()]:
            if op in operators:
                continue
            operators.add(op)
            fresh = [s for s in _foreign_inputs(graph.ops[op], forward) if s not in storages]
            storages.update(fresh)
            waiting.extend(fresh)
    return tuple(sorted(operators)), tuple(sorted(storages))


def _certain_bytes(graph: StepGraph, forward: frozenset[int], moment: int) -> int:
    """Bytes there at ``moment`` in every schedule, beside forward storages.

    What was there before the step counts when it outlives it; what backward operators made counts when
    ``moment`` makes it or a later operator reads it or it outlives the step.
    """
    read_later = {s for op in graph.ops[moment:] for s in (*op.inputs, *op.mutates)}
    total = graph.ops[moment].temporary_bytes
    for storage in graph.storages:
        if storage.id in forward or storage.born > moment:
            continue
        if storage.born < 0:
            total += storage.size_bytes if storage.died < 0 else 0
        elif storage.died < 0 or storage.born == moment or storage.id in read_later:
            total += storage.size_bytes
    return total
