"""The mixed-integer program: one option per block, memory at every point of the step, least recomputation.

Blocks of a class are alike, so their order costs a solver dearly (12 equal blocks take a naive program
seconds). Among equal blocks those that keep less had best come first in the forward: every position's sum
over the earlier blocks is then least. So the program asks for that order, block after block (or group after
group, in long chains), which cuts the symmetry away and keeps the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds

from memfit.planning.highs import minimise
from memfit.planning.problem import Option, Problem, pareto_options
from memfit.techniques.program_rows import Rows

RELATIVE_GAP = 0.005
MOST_NODES = 5000
"""The program stops at a number of nodes rather than at a time, so that a slow machine gets the same plan."""
TIME_LIMIT_SECONDS = 60.0
GROUPS_PER_CLASS = 24
"""Longer chains are chosen in groups of neighbours: a group of size s takes s options in any mix."""
MOST_OPTIONS = 14
"""Options of a class that the program chooses among: the best of its Pareto front."""
_TIE_BREAK = 1e-4
"""Among choices of equal time the one that keeps least wins: this part of the time's scale is given to bytes.
"""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """``choice[i]`` is the number of the option that position ``i`` takes; ``peak_bytes`` is the program's
    own sum."""

    choice: tuple[int, ...]
    recompute_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class _Group:
    """Neighbours of one class that are chosen together, and where their variables start.

    ``options`` are those that no other beats, ``numbers`` what the class calls them.
    """

    positions: tuple[int, ...]
    options: tuple[Option, ...]
    numbers: tuple[int, ...]
    first: int
    class_number: int

    def variables(self) -> range:
        return range(self.first, self.first + len(self.options))


def solve(
    problem: Problem, budget_bytes: int, *, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> Solution | None:
    """The choice of least recomputation whose predicted peak is within ``budget_bytes``; None when there is
    none.

    Same problem, same answer. Within `RELATIVE_GAP` of the optimum, exactly so where chains have no more than
    `GROUPS_PER_CLASS` blocks of a class.
    """
    if problem.optimizer_bytes > budget_bytes:
        return None
    if not problem.blocks:
        peak_bytes = problem.peak_bytes(())
        fits = peak_bytes <= budget_bytes
        return Solution(choice=(), recompute_seconds=0.0, peak_bytes=peak_bytes) if fits else None
    groups = _groups(problem)
    rows = Rows()
    _add_choices(rows, groups)
    _add_order(rows, groups)
    _add_memory(rows, groups, problem, budget_bytes)
    result = minimise(
        _costs(groups),
        constraint=rows.constraint(_width(groups)),
        bounds=Bounds(0, np.repeat([len(g.positions) for g in groups], [len(g.options) for g in groups])),
        integral=True,
        options={"mip_rel_gap": RELATIVE_GAP, "node_limit": MOST_NODES, "time_limit": time_limit_seconds},
    )
    if result.x is None:
        return None
    choice = _read(groups, np.rint(result.x).astype(int), len(problem.blocks))
    return Solution(
        choice=choice,
        recompute_seconds=problem.recompute_seconds(choice),
        peak_bytes=problem.peak_bytes(choice),
    )


def _groups(problem: Problem) -> list[_Group]:
    """Classes cut into at most `GROUPS_PER_CLASS` runs of neighbours, options by kept bytes, least first."""
    groups: list[_Group] = []
    first = 0
    for number, block_class in enumerate(problem.classes):
        options = pareto_options(block_class.options, limit=MOST_OPTIONS)
        numbers = tuple(block_class.options.index(option) for option in options)
        count = len(block_class.positions)
        cuts = np.linspace(0, count, min(count, GROUPS_PER_CLASS) + 1).round().astype(int)
        for start, end in itertools.pairwise(cuts):
            groups.append(_Group(block_class.positions[start:end], options, numbers, first, number))
            first += len(options)
    return groups


def _width(groups: Sequence[_Group]) -> int:
    return groups[-1].variables().stop if groups else 0


def _by_kept_bytes(options: Sequence[Option]) -> list[int]:
    return sorted(range(len(options)), key=lambda number: (options[number].saved_bytes, number))


def _add_choices(rows: Rows, groups: Sequence[_Group]) -> None:
    """Each block takes one option."""
    for group in groups:
        count = len(group.positions)
        rows.add([(column, 1.0) for column in group.variables()], count, count)


def _add_order(rows: Rows, groups: Sequence[_Group]) -> None:
    """Of two neighbouring groups of a class, the earlier one keeps no more: for each option, as shares of the
    group."""
    for before, after in itertools.pairwise(groups):
        if before.class_number != after.class_number:
            continue
        order = _by_kept_bytes(before.options)
        for upto in range(1, len(order)):
            terms = [(before.first + number, 1.0 / len(before.positions)) for number in order[:upto]]
            terms += [(after.first + number, -1.0 / len(after.positions)) for number in order[:upto]]
            rows.add(terms, 0.0, np.inf)


def _add_memory(rows: Rows, groups: Sequence[_Group], problem: Problem, budget_bytes: int) -> None:
    """The budget at the end of the forward pass and where the backward pass reaches each group (bytes in
    MiB).

    Within a group of several blocks all that the group keeps counts from its first position on: a little too
    much.
    """
    mib = 2.0**20
    kept = [
        (column, o.saved_bytes / mib)
        for g in groups
        for column, o in zip(g.variables(), g.options, strict=True)
    ]
    rows.add(kept, -np.inf, (budget_bytes - problem.forward_end_bytes) / mib)
    for group in groups:
        start, size = group.positions[0], len(group.positions)
        base = max(problem.position_bytes[position] for position in group.positions)
        terms = [
            (column, option.saved_bytes / mib)
            for other in groups
            if other.positions[0] < start
            for column, option in zip(other.variables(), other.options, strict=True)
        ]
        own = (size - 1) / size
        for column, option in zip(group.variables(), group.options, strict=True):
            terms.append((column, (own * option.saved_bytes + option.working_bytes / size) / mib))
        rows.add(terms, -np.inf, (budget_bytes - base) / mib)


def _costs(groups: Sequence[_Group]) -> npt.NDArray[np.float64]:
    """Seconds, scaled to about one, with the tie-break on kept bytes."""
    seconds = np.array([option.recompute_seconds for group in groups for option in group.options])
    kept = np.array([option.saved_bytes for group in groups for option in group.options], dtype=float)
    scale = seconds.max() if seconds.size and seconds.max() > 0 else 1.0
    costs: npt.NDArray[np.float64] = seconds / scale + _TIE_BREAK * kept / max(kept.max(), 1.0)
    return costs


def _read(groups: Sequence[_Group], counts: npt.NDArray[np.int64], blocks: int) -> tuple[int, ...]:
    """Counts per group to one option per position, fewest kept bytes first within a group."""
    choice = [0] * blocks
    for group in groups:
        numbers = [n for n in _by_kept_bytes(group.options) for _ in range(counts[group.first + n])]
        for position, number in zip(group.positions, numbers, strict=True):
            choice[position] = group.numbers[number]
    return tuple(choice)
