"""The lower bound of several moments together: what is made again for one of them may have to be given back
before the next, and made once more.

Let ``t_1 < t_2 < …`` be operators of the traced step, forward or backward. In any schedule, with ``s_vi`` (v
is held when ``t_i`` runs), ``r_oi`` (o runs again between ``t_i`` and ``t_(i+1)``) and ``q_oi`` (o runs again
at some time after ``t_i``), for storages and operators that come before ``t_i``:

    s_vi + r_oi ≥ 1            v is read by a traced operator from t_i to t_(i+1), o writes v
    s_vi + q_oi ≥ 1            … from t_i on
    r_oi ≤ s_ui + r_o'i        o reads u, o' writes u; the same of q
    s_v(i+1) ≤ s_vi + r_oi     o writes v
    q_oi ≤ r_oi + q_o(i+1),    q_oi ≥ r_oi,    q_oi ≥ q_o(i+1)
    Σ size_v s_vi ≤ peak − (what else is certainly there at t_i)
    minimise Σ cost_o r_oi

The ``q`` say nothing new of whole numbers; without them the relaxation is weaker than that of one moment.
What ``t_i`` reads is held when it runs, and so is what Python holds then (``lives``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds

from memfit.capture.graph import StepGraph
from memfit.planning.highs import minimise
from memfit.techniques.program_rows import Rows

MOST_CUTS = 4
CUTS_PER_PASS = 24
MOST_PARTNERS = 12
"""The moments that certify most alone are taken together with others."""
MOST_COLUMNS = 30_000
MOST_NODES = 100
_MIB = 2.0**20
_SLACK = 1e-6
"""The solver's own tolerance, given back."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step read for its bound.

    Attributes:
        graph: the plain step.
        costs: of each of its operators.
        forward: the storages that forward operators make.
        writers: for each of them the forward operators that fill it.
        lives: until which forward operator Python holds some of them, whatever is kept.
    """

    graph: StepGraph
    costs: Sequence[float]
    forward: frozenset[int]
    writers: Mapping[int, tuple[int, ...]]
    lives: Mapping[int, int]

    def reads(self, index: int) -> list[int]:
        """The forward storages that an operator must find."""
        op = self.graph.ops[index]
        return [storage for storage in op.inputs if storage in self.forward]

    def foreign(self, index: int) -> list[int]:
        """Those of them that it does not write itself."""
        return [s for s in self.reads(index) if s not in self.graph.ops[index].mutates]

    def held(self, cut: int) -> set[int]:
        """What is there when ``cut`` runs, in every schedule."""
        storages = self.graph.storages
        read = {s for s in self.reads(cut) if storages[s].born < cut}
        return read | {s for s, until in self.lives.items() if storages[s].born < cut <= until}

    def needed(self, cut: int, end: int) -> set[int]:
        """What was made before ``cut`` and traced operators before ``end`` read."""
        return {
            storage
            for op in self.graph.ops[cut:end]
            if op.phase in ("forward", "backward") and not op.is_view
            for storage in self.reads(op.index)
            if self.graph.storages[storage].born < cut
        }

    def certain_bytes(self, cut: int) -> int:
        """Bytes there when ``cut`` runs, in every schedule, beside forward storages made before it.

        What was there before the step counts when it outlives it; what backward operators made counts when
        ``cut`` makes it or a later operator reads it or it outlives the step.
        """
        graph = self.graph
        total = graph.ops[cut].temporary_bytes
        later = {s for op in graph.ops[cut:] for s in (*op.inputs, *op.mutates)}
        for storage in graph.storages:
            if storage.born == cut:
                total += storage.size_bytes
            elif storage.born > cut or storage.id in self.forward:
                continue
            elif storage.died < 0 or (storage.born >= 0 and storage.id in later):
                total += storage.size_bytes
        return total


def joint_bound(step: TracedStep, peak_bytes: int, *, at_least: float, time_limit_seconds: float) -> float:
    """The largest bound found over sets of moments; infinite where no schedule at all has such a peak.

    Args:
        step: the step.
        peak_bytes: live bytes as requested.
        at_least: where this is reached, no more moments are taken together.
        time_limit_seconds: for each program.
    """
    cuts = _candidates(step)
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for _ in range(MOST_CUTS):
        sets = [tuple(sorted({*best[1], cut})) for cut in cuts if cut not in best[1]]
        found = [(_solved(step, peak_bytes, chosen, False, time_limit_seconds), chosen) for chosen in sets]
        if not best[1]:
            cuts = [chosen[0] for _, chosen in sorted(found, reverse=True)[:MOST_PARTNERS]]
        better = max(found, default=best)
        if better[0] <= best[0] * (1 + _SLACK):
            break
        best = better
        if best[0] >= at_least:
            return best[0]
    if not best[1] or best[0] == float("inf"):
        return best[0]
    return max(best[0], _solved(step, peak_bytes, best[1], True, time_limit_seconds))


def _candidates(step: TracedStep) -> list[int]:
    """Backward operators where the plain step holds most, forward ones where most is there for certain, of
    equal stretches."""
    graph, sizes = step.graph, step.graph.storages
    chosen: list[int] = []
    for phase in ("forward", "backward"):
        ops = [op.index for op in graph.ops if op.phase == phase and not op.is_view]
        if phase == "forward":
            weights = {n: sum(sizes[s].size_bytes for s in step.held(n)) + _own_bytes(step, n) for n in ops}
        else:
            weights = {n: int(graph.live_bytes[n]) for n in ops}
        for stretch in np.array_split(np.array(ops, dtype=int), min(CUTS_PER_PASS, len(ops)) or 1):
            if stretch.size:
                chosen.append(max(map(int, stretch), key=lambda n: (weights[n], -n)))  # noqa: B023
    return chosen


def _own_bytes(step: TracedStep, index: int) -> int:
    """Bytes that an operator makes."""
    storages = step.graph.storages
    return sum(storages[s].size_bytes for s in step.graph.ops[index].outputs if storages[s].born == index)


class _Columns:
    """Numbers of variables, as they are asked for."""

    def __init__(self) -> None:
        self.number: dict[tuple[str, int, int], int] = {}

    def __call__(self, kind: str, item: int, at: int) -> int:
        return self.number.setdefault((kind, item, at), len(self.number))


def _solved(
    step: TracedStep, peak_bytes: int, cuts: Sequence[int], integral: bool, time_limit_seconds: float
) -> float:
    """The bound of these moments together, or of the relaxation."""
    rows, column = Rows(), _Columns()
    held: set[int] = set()
    for at, cut in enumerate(cuts):
        there = step.held(cut)
        storages, operators = _involved(step, cut, there)
        room = peak_bytes - step.certain_bytes(cut)
        if room < sum(step.graph.storages[s].size_bytes for s in there):
            return float("inf")
        held.update(column("s", storage, at) for storage in there)
        rows.add(
            [(column("s", s, at), step.graph.storages[s].size_bytes / _MIB) for s in storages],
            -np.inf,
            room / _MIB,
        )
        _add_needs(step, rows, column, cuts, at, there)
        _add_again(step, rows, column, cuts, at, operators)
    width = len(column.number)
    if not width or width > MOST_COLUMNS:
        return 0.0
    costs, low = np.zeros(width), np.zeros(width)
    for (kind, item, _), number in column.number.items():
        if kind == "r":
            costs[number] = step.costs[item]
    low[list(held)] = 1.0
    scale = float(costs.max(initial=0.0)) or 1.0
    result = minimise(
        costs / scale,
        constraint=rows.constraint(width),
        bounds=Bounds(low, 1.0),
        integral=integral,
        options={"mip_rel_gap": 0.005, "node_limit": MOST_NODES, "time_limit": time_limit_seconds},
    )
    if result.status == 2:
        return float("inf")
    proven = result.mip_dual_bound if integral else result.fun
    if proven is None or not np.isfinite(proven):
        return 0.0
    return max(float(proven) * (1 - _SLACK) - _SLACK, 0.0) * scale


def _involved(step: TracedStep, cut: int, held: set[int]) -> tuple[list[int], list[int]]:
    """Storages and operators before ``cut`` that making the needed ones again can involve."""
    storages = step.needed(cut, len(step.graph.ops)) | held
    operators: set[int] = set()
    waiting = sorted(storages)
    while waiting:
        for op in step.writers[waiting.pop()]:
            if op >= cut or op in operators:
                continue
            operators.add(op)
            fresh = [s for s in step.foreign(op) if s not in storages]
            storages.update(fresh)
            waiting.extend(fresh)
    return sorted(storages), sorted(operators)


def _add_needs(
    step: TracedStep, rows: Rows, column: _Columns, cuts: Sequence[int], at: int, held: set[int]
) -> None:
    """What is read is held or made again, in the interval or at all."""
    cut = cuts[at]
    ends = (("r", cuts[at + 1] if at + 1 < len(cuts) else len(step.graph.ops)), ("q", len(step.graph.ops)))
    for kind, end in ends:
        for storage in sorted(step.needed(cut, end) - held):
            for writer in step.writers[storage]:
                if writer < cut:
                    terms = [(column("s", storage, at), 1.0), (column(kind, writer, at), 1.0)]
                    rows.add(terms, 1.0, np.inf)


def _add_again(
    step: TracedStep, rows: Rows, column: _Columns, cuts: Sequence[int], at: int, operators: Sequence[int]
) -> None:
    """What runs again finds what it reads; what is held at the next moment was held or made again."""
    cut, is_last = cuts[at], at + 1 == len(cuts)
    for op in operators:
        again, ever = column("r", op, at), column("q", op, at)
        rows.add([(ever, 1.0), (again, -1.0)], 0.0, np.inf)
        later = [] if is_last else [(column("q", op, at + 1), 1.0)]
        rows.add([(again, 1.0), *later, (ever, -1.0)], 0.0, np.inf)
        if later:
            rows.add([(ever, 1.0), (later[0][0], -1.0)], 0.0, np.inf)
        for storage in step.foreign(op):
            for maker in step.writers[storage]:
                if maker < op:
                    for kind in ("r", "q"):
                        rows.add(
                            [
                                (column("s", storage, at), 1.0),
                                (column(kind, maker, at), 1.0),
                                (column(kind, op, at), -1.0),
                            ],
                            0.0,
                            np.inf,
                        )
    if not is_last:
        storages, _ = _involved(step, cut, step.held(cut))
        for storage in storages:
            for writer in step.writers[storage]:
                if writer < cut:
                    terms = [
                        (column("s", storage, at), 1.0),
                        (column("r", writer, at), 1.0),
                        (column("s", storage, at + 1), -1.0),
                    ]
                    rows.add(terms, 0.0, np.inf)
