"""Solve, run, tighten: makes the solver's sums meet what the allocator really reserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.planning.bench import Bench, Try
from memfit.planning.problem import Option, Problem, pareto_options
from memfit.planning.problems import choice_of, schedule_of
from memfit.planning.schedules import Lever, Rematerialized
from memfit.planning.solve import solve

ROUNDS = 8
STEP_SHARE = 0.005
"""By how much of the budget the next plan is leaner at least, when one did not fit."""
SLACK_SHARE = 0.01
"""Where a plan leaves more than this part of the budget unused, the next round may use more."""

LUCK_SHARE = 0.01
"""By how much of the budget a neighbour may exceed it by its sum and still be run: segments may suit it."""


@dataclass(frozen=True, kw_only=True)
class LeverProblem:
    """One lever's problem, and the seconds of its step with every block plain.

    ``overhead_bytes``: what the allocator reserves over the problem's own sum; ``expected_seconds``: of the
    best plan.
    """

    lever: Lever
    problem: Problem
    base_seconds: float
    overhead_bytes: int = 0
    expected_seconds: float = 0.0


class Refiner:
    """Plans under one lever for one budget, tried on the bench.

    Args:
        bench: where they are tried.
        case: the lever and its problem.
        budget_bytes: for the reserved peak.
    """

    def __init__(self, bench: Bench, case: LeverProblem, budget_bytes: int) -> None:
        self.bench = bench
        self.case = case
        self.budget_bytes = budget_bytes

    def tighten(self) -> list[Try]:
        """Solves in the solver's own sums, runs the plan, and corrects by what the allocator reserved over
        the sum, until a plan fits with little room left.

        That overhead jumps between plans that differ by little, as a large block finds a hole or does not.
        So a plan that does not fit is run in the mirrored order as well, and between a sum that fits and one
        that does not the middle is tried.
        """
        tried: list[Try] = []
        allowance, failing = self.budget_bytes - self.case.overhead_bytes, 0
        for _ in range(ROUNDS):
            solution = solve(self.case.problem, allowance)
            if solution is None:
                break
            attempts = self._both_orders(solution.choice)
            if any(attempt.key == other.key for attempt in attempts for other in tried):
                break
            tried += attempts
            best = min(attempts, key=lambda attempt: attempt.peaks.reserved_bytes)
            room = self.budget_bytes - (best.peaks.reserved_bytes - solution.peak_bytes)
            if not self._fits(best):
                failing = solution.peak_bytes
                allowance = min(room, failing - int(STEP_SHARE * self.budget_bytes))
            elif self._is_tight(best):
                break
            else:
                allowance = min(room, (solution.peak_bytes + failing) // 2) if failing else room
        return tried

    def _both_orders(self, choice: Sequence[int]) -> list[Try]:
        """The plan, and its mirror image where it does not fit and the image may."""
        attempts = [self._try(choice)]
        if not self._fits(attempts[0]):
            mirrored = self._mirrored(choice)
            if self.case.problem.peak_bytes(mirrored) <= self.budget_bytes:
                attempts.append(self._try(mirrored))
        return attempts

    def _fits(self, tried: Try) -> bool:
        return tried.fits(self.budget_bytes)

    def _is_tight(self, tried: Try) -> bool:
        """Whether little room is left, or nothing to gain from it."""
        left = self.budget_bytes - tried.peaks.reserved_bytes
        return left <= SLACK_SHARE * self.budget_bytes or tried.seconds <= self.case.base_seconds

    def _mirrored(self, choice: Sequence[int]) -> list[int]:
        """The same options, dealt to each class's blocks in the opposite order."""
        mirrored = list(choice)
        for block_class in self.case.problem.classes:
            numbers = [choice[position] for position in block_class.positions]
            for position, number in zip(block_class.positions, reversed(numbers), strict=True):
                mirrored[position] = number
        return mirrored

    def _try(self, choice: Sequence[int]) -> Try:
        seconds = self.case.base_seconds + self.case.problem.recompute_seconds(choice)
        return self.bench.evaluate(
            "planned", self.case.lever, schedule_of(self.case.problem, choice), seconds
        )

    def improve(self, start: Try, limit: int) -> list[Try]:
        """Local search on the bench: gives one block after another a cheaper option, as long as the step
        still fits.

        Among blocks that are alike and keep the same, only the first and the last of each run are tried, and
        only changes whose sum is near the budget: the allocator's share moves by little between such plans.
        """
        table = self.case.problem.option_table()
        known = None
        if not isinstance(start.schedule, Rematerialized):
            known = choice_of(self.case.problem, start.schedule)
        if known is None:
            return []
        choice = list(known)
        overhead_bytes = start.peaks.reserved_bytes - self.case.problem.peak_bytes(choice)
        allowance_bytes = int(self.budget_bytes * (1 + LUCK_SHARE)) - overhead_bytes
        tried: list[Try] = []
        last = self.bench.evaluations + limit
        moved = True
        while moved:
            moved = False
            for position, number in self._moves(choice, table):
                if self.bench.evaluations >= last:
                    return tried
                changed = [*choice[:position], number, *choice[position + 1 :]]
                if self.case.problem.peak_bytes(changed) > allowance_bytes:
                    continue
                attempt = self._try(changed)
                tried.append(attempt)
                if self._fits(attempt):
                    choice[position] = number
                    moved = True
                    break
        return tried

    def _moves(self, choice: Sequence[int], table: Sequence[Sequence[Option]]) -> list[tuple[int, int]]:
        """Single changes that save time, the largest saving first."""
        moves = []
        for block_class in self.case.problem.classes:
            positions = block_class.positions
            front = pareto_options(block_class.options)
            for place, position in enumerate(positions):
                if _inside_a_run(positions, place, choice):
                    continue
                now = table[position][choice[position]]
                for number, option in enumerate(table[position]):
                    if option not in front:
                        continue
                    gain = now.recompute_seconds - option.recompute_seconds
                    if gain > 0:
                        moves.append((-gain, position, number))
        return [(position, number) for _, position, number in sorted(moves)]

    def sweep(self, points: int) -> list[Try]:
        """Plans for budgets spread evenly between the leanest sum and the plain one: they draw the front."""
        problem = self.case.problem
        high = problem.peak_bytes([0] * len(problem.blocks))
        low = problem.peak_bytes(self._leanest())
        tried = []
        for point in range(1, points + 1):
            solution = solve(problem, low + (high - low) * point // (points + 1))
            if solution is not None:
                tried.append(self._try(solution.choice))
        return tried

    def least(self) -> Try:
        """The plan that keeps as little as the options allow."""
        return self._try(self._leanest())

    def _leanest(self) -> list[int]:
        choice = []
        for options in self.case.problem.option_table():
            kept = [option.saved_bytes for option in options]
            choice.append(kept.index(min(kept)))
        return choice


def _inside_a_run(positions: Sequence[int], place: int, choice: Sequence[int]) -> bool:
    """Whether both neighbours in the class keep the same as this block."""
    if place in (0, len(positions) - 1):
        return False
    here = choice[positions[place]]
    return choice[positions[place - 1]] == here == choice[positions[place + 1]]
