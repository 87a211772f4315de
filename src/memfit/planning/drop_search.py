"""Plans that compute again operator by operator, tried on the bench: solve, run, tighten, neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.capture.graph import StepGraph
from memfit.planning.bench import Bench, Try
from memfit.planning.drops import DropProgram, Drops
from memfit.planning.figures import Settings
from memfit.planning.schedules import Rematerialized
from memfit.techniques.recomputed_steps import RecomputedStep

ROUNDS = 8
STEP_SHARE = 0.005
"""By how much of the budget the next plan is leaner at least, when one did not fit."""
TIGHT_SHARE = 0.97
"""A plan that reserves this part of the budget is improved by its neighbours only."""
LUCK_SHARE = 0.01
"""By how much of the budget a neighbour may exceed it by its sum and still be run: segments may suit it."""

AT_ONCE = 2
"""Neighbours that are run at the same time; the first that fits counts, so that the plan is the same."""
LONGER_SHARE = 0.02
"""A plan that requests this much more than its sum holds results longer than operators read them."""
DEEP_SHARE = 0.05
"""Plans that recompute more than this part of the step are compared with the program's for the same peak."""
POLISH_SHARES = (1.0, 1.002, 1.005)
"""Of the peak that they have."""
NO_BUDGET = 1
"""Bytes: asks for the least that any plan needs."""
LEAN_SHARES = (
    *(0.0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.013, 0.016, 0.02, 0.025),
    *(0.03, 0.035, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.15, 0.2),
)
"""Plans that are run in search of the least reserved peak: shares of what lies between the least sum and the
plain step's. What the allocator reserves over the sums differs much between them."""
HOPELESS_STEP = 10
"""Where even the least sum exceeds the budget, only every tenth of them is run."""

Seconds = Callable[[StepGraph], Sequence[float]]
Capture = Callable[[Sequence[Settings]], StepGraph | None]


class DropSearch:
    """Plans under one lever for one budget.

    Args:
        bench: where they are tried.
        plain: the step without recomputation under the lever, on the bench.
        base_seconds: that it takes.
        program: of `program_of`, shared by levers that do not change the graph.
        capture: gives the step captured with techniques, or None where that cannot be.
    """

    def __init__(
        self, bench: Bench, plain: Try, base_seconds: float, program: DropProgram, capture: Capture
    ) -> None:
        self.bench = bench
        self.lever = plain.lever
        self.program = program
        self.budget_bytes = 0
        self.base_seconds = base_seconds
        self._plain_bytes = program.step.graph.peak_bytes
        self._beside_bytes = plain.peaks.requested_bytes - self._plain_bytes
        self._capture = capture
        self._found: dict[str, Drops] = {}

    def expected(self, overhead_bytes: int) -> float:
        """The least seconds to expect within the budget, without solving for a plan; infinite where there is
        none."""
        return self.base_seconds + self.program.least_seconds(self.budget_bytes - overhead_bytes)

    def tighten(self, overhead_bytes: int) -> list[Try]:
        """Solves for what the step may have live, runs the plan, and corrects by what the allocator reserved
        over that, until a plan fits and uses nearly all of the budget."""
        tried: list[Try] = []
        allowance, failing, fitting = self.budget_bytes - overhead_bytes, 0, 0
        for _ in range(ROUNDS):
            found = self.program.solve(allowance)
            if found is None:
                break
            attempt = self._try(found)
            if self._learns(attempt, found):
                continue
            if attempt.peaks.failure or any(attempt.key == other.key for other in tried):
                break
            tried.append(attempt)
            over = attempt.peaks.reserved_bytes - self.budget_bytes
            if over > 0:
                failing = min(failing or found.peak_bytes, found.peak_bytes)
                lower = found.peak_bytes - max(over, int(STEP_SHARE * self.budget_bytes))
                allowance = max(lower, (failing + fitting) // 2) if fitting else lower
            elif self._is_tight(attempt):
                break
            else:
                fitting = max(fitting, found.peak_bytes)
                allowance = (fitting + failing) // 2 if failing > fitting else found.peak_bytes - over
        return tried

    def _learns(self, tried: Try, drops: Drops) -> bool:
        """Whether a plan needs so much more than its sum that it is asked how long results really stay."""
        longer = tried.peaks.requested_bytes - self._beside_bytes - drops.peak_bytes
        if self.program.lives is not None or longer <= LONGER_SHARE * drops.peak_bytes:
            return False
        nothing = Rematerialized(keeps=tuple(self.program.nothing_kept().items()))
        dropped = self._capture(
            self.bench.techniques(replace(self.lever, settings=self.lever.step_settings), nothing)
        )
        self.program.learn(None if dropped is None else first_round(dropped))
        return True

    def _is_tight(self, tried: Try) -> bool:
        """Whether little room is left, or nothing to gain from it."""
        return (
            tried.peaks.reserved_bytes >= TIGHT_SHARE * self.budget_bytes
            or tried.seconds <= self.base_seconds
        )

    def improve(self, start: Try, limit: int) -> list[Try]:
        """Local search on the bench: keeps one result more after another, or one in place of another, as long
        as the step still fits and gets faster."""
        tried: list[Try] = []
        known = self._found.get(start.key)
        drops = None if known is None else self.program.play(known.kept)
        last = self.bench.evaluations + limit
        while drops is not None and self.bench.evaluations < last:
            overhead = start.peaks.reserved_bytes - drops.peak_bytes
            better = None
            neighbours = self._neighbours(drops, int(self.budget_bytes * (1 + LUCK_SHARE)) - overhead)
            for number, neighbour in enumerate(neighbours):
                if self.bench.evaluations >= last:
                    return tried
                if number % AT_ONCE == 0:
                    self._ahead(neighbours[number : number + min(AT_ONCE, last - self.bench.evaluations)])
                attempt = self._try(neighbour)
                tried.append(attempt)
                if attempt.fits(self.budget_bytes):
                    better = neighbour
                    start = attempt
                    break
            drops = better
        return [*tried, *self._polished(start)]

    def _polished(self, start: Try) -> list[Try]:
        """Where much is recomputed, the program's own choices for about the peak of a plan that was found
        otherwise."""
        drops = self._found.get(start.key)
        if drops is None or drops.seconds < DEEP_SHARE * self.base_seconds:
            return []
        peak_bytes = self.program.play(drops.kept).peak_bytes
        found = (self.program.solve(int(share * peak_bytes)) for share in POLISH_SHARES)
        return [self._try(other) for other in found if other is not None and other.seconds < drops.seconds]

    def _neighbours(self, drops: Drops, allowance_bytes: int) -> list[Drops]:
        """Choices that keep one more and are faster, the fastest first, within what the sums allow."""
        found = []
        for op in self.program.makers:
            if op not in drops.kept:
                more = self.program.play(drops.kept | {op})
                if more.seconds < drops.seconds and more.peak_bytes <= allowance_bytes:
                    found.append(more)
        return sorted(found, key=lambda more: (more.seconds, more.peak_bytes, sorted(more.kept)))

    def sweep(self, points: int) -> list[Try]:
        """Plans for budgets spread evenly between this one and the plain step's peak: they draw the front."""
        low, high = min(self.budget_bytes, self._plain_bytes), self._plain_bytes
        peaks = (low + (high - low) * point // (points + 1) for point in range(1, points + 1))
        found = [drops for drops in map(self.program.solve, peaks) if drops is not None]
        self._ahead(found)
        return list(map(self._try, found))

    def least(self) -> list[Try]:
        """Plans with sums about the least, until one fits."""
        leanest = self.program.leanest()
        tried = [self._try(leanest)]
        if self._learns(tried[0], leanest):
            leanest = self.program.leanest()
        is_hopeless = NO_BUDGET < self.budget_bytes < leanest.peak_bytes
        for share in LEAN_SHARES[:: HOPELESS_STEP if is_hopeless else 1]:
            found = self.program.lean(share)
            if found is not None:
                tried.append(self._try(found))
                if tried[-1].fits(self.budget_bytes):
                    break
        return tried

    def _ahead(self, drops: Sequence[Drops]) -> None:
        self.bench.evaluate_ahead([(self.lever, self._schedule(d)) for d in drops])

    def _schedule(self, drops: Drops) -> Rematerialized:
        return Rematerialized(keeps=tuple(self.program.keeps(drops.kept).items()))

    def _try(self, drops: Drops) -> Try:
        attempt = self.bench.evaluate(
            "planned", self.lever, self._schedule(drops), self.base_seconds + drops.seconds
        )
        self._found[attempt.key] = drops
        return attempt


def program_of(
    graph: StepGraph, blocks: Sequence[str], seconds: Sequence[float], micro_batches: int
) -> DropProgram:
    """The program of a step; with micro-batches that of one of them, whose operators cost as many times
    more."""
    one_round = first_round(graph)
    step = RecomputedStep(one_round, (*blocks, ""))
    return DropProgram(step, [micro_batches * s for s in seconds[: len(one_round.ops)]])


def first_round(graph: StepGraph) -> StepGraph:
    """The step up to the end of its first backward pass: one micro-batch of several. A step of one round is
    given back as it is."""
    begins = [
        op.index
        for op, before in zip(graph.ops[1:], graph.ops, strict=False)
        if op.phase == "forward" and before.phase in ("backward", "recompute")
    ]
    if not begins:
        return graph
    end = begins[0]
    storages = tuple(
        replace(s, died=-1 if s.died >= end else s.died)
        if s.born < end
        else replace(s, born=end - 1, died=end - 1, size_bytes=0)
        for s in graph.storages
    )
    return replace(graph, ops=graph.ops[:end], storages=storages)
