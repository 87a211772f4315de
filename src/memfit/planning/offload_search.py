"""Plans that move what some blocks save to host memory, and keep or recompute what the others save.

The first blocks are offloaded: what they save stays longest, so its copies have most time. For each number of
them the block program chooses what the others keep; the number with the least expected time is run, and
corrected by what the allocator reserved over the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from memfit.capture.graph import StepGraph
from memfit.planning.bench import Bench, Try
from memfit.planning.figures import Settings
from memfit.planning.layout import Layout
from memfit.planning.lever_kinds import copy_seconds, exposed, link_seconds, phase_seconds
from memfit.planning.problem import BlockClass, Option, Problem
from memfit.planning.problems import schedule_of
from memfit.planning.refine import LeverProblem
from memfit.planning.schedules import Saves
from memfit.planning.solve import solve

ROUNDS = 3
ROUNDS_TO_BEAT = 2
"""Where another plan fits: offloaded blocks are slow to run, as their host memory is there for real."""
MOST_COUNTS = 12
"""Numbers of offloaded blocks that are thought through."""
LEAST_BYTES = 4096 * 4
"""Smaller saved tensors stay on the device, as the technique leaves them by default."""
STEP_SHARE = 0.005


@dataclass(frozen=True, kw_only=True)
class _Thought:
    """Some blocks offloaded, and what the others keep: what that is expected to take."""

    count: int
    schedule: tuple[Saves, ...]
    seconds: float
    peak_bytes: int


class OffloadSearch:
    """Plans with offloaded blocks under one lever, for one budget.

    Args:
        bench: where they are run.
        case: the lever and its problem, block by block.
        graph: the step captured under the lever, with nothing recomputed.
        budget_bytes: for the reserved peak.
    """

    def __init__(self, bench: Bench, case: LeverProblem, graph: StepGraph, budget_bytes: int) -> None:
        self.bench, self.case, self.graph, self.budget_bytes = bench, case, graph, budget_bytes
        self.layout = Layout(graph=graph, blocks=case.problem.blocks, passes=case.lever.micro_batches)
        self._seconds = bench.seconds(graph)

    def tighten(self, best_seconds: float) -> list[Try]:
        """Runs what may be faster than ``best_seconds``, until a plan fits; and, where nothing does, the
        leanest: every block recomputed, and its inputs offloaded."""
        tried: list[Try] = []
        allowance = self.budget_bytes - self.case.overhead_bytes
        for _ in range(ROUNDS if best_seconds == float("inf") else ROUNDS_TO_BEAT):
            thought = self._best(allowance)
            if thought is None or thought.seconds >= best_seconds:
                break
            attempt = self._run(thought)
            if attempt.peaks.failure or any(attempt.key == other.key for other in tried):
                break
            over = attempt.peaks.reserved_bytes - self.budget_bytes
            stuck = any(attempt.peaks.reserved_bytes >= other.peaks.reserved_bytes for other in tried)
            tried.append(attempt)
            if over <= 0 or stuck:  # or the peak is not where blocks hold anything
                break
            allowance = min(allowance, thought.peak_bytes) - max(over, int(STEP_SHARE * self.budget_bytes))
        if best_seconds == float("inf") and not any(map(self._fits, tried)):
            tried.append(self._run(self._leanest()))
        return tried

    def expected(self) -> float:
        """The seconds to expect within the budget; infinite where nothing is expected to fit."""
        thought = self._best(self.budget_bytes - self.case.overhead_bytes)
        return float("inf") if thought is None else thought.seconds

    def _fits(self, tried: Try) -> bool:
        return tried.fits(self.budget_bytes)

    def _best(self, allowance_bytes: int) -> _Thought | None:
        blocks = len(self.case.problem.blocks)
        counts = sorted({-(-blocks * n // MOST_COUNTS) for n in range(1, MOST_COUNTS + 1)})
        thoughts = [self._think(count, allowance_bytes) for count in counts if count <= blocks]
        return min((t for t in thoughts if t is not None), key=lambda t: (t.seconds, t.count), default=None)

    def _think(self, count: int, allowance_bytes: int) -> _Thought | None:
        problem = self._with_offloaded(count)
        found = solve(problem, allowance_bytes)
        if found is None:
            return None
        seconds = self.case.base_seconds + found.recompute_seconds + self._transfer(count)[0]
        return _Thought(
            count=count,
            schedule=schedule_of(problem, found.choice),
            seconds=seconds,
            peak_bytes=found.peak_bytes,
        )

    def _leanest(self) -> _Thought:
        """Every block recomputed from inputs that are in host memory."""
        blocks = len(self.case.problem.blocks)
        seconds = self.case.base_seconds + phase_seconds(self.graph, self._seconds, "forward")
        return _Thought(count=blocks, schedule=((),) * blocks, seconds=seconds, peak_bytes=0)

    def _with_offloaded(self, count: int) -> Problem:
        """The problem in which the first ``count`` blocks have one option: nothing is kept but what is too
        small to move."""
        kept = self.layout.kept_bytes
        classes = []
        for position in range(count):
            option = Option(
                saves=None,
                saved_bytes=max(kept[position] - self._movable[position], 0),
                working_bytes=kept[position],
                recompute_seconds=0.0,
            )
            classes.append(BlockClass(name=f"offloaded {position}", positions=(position,), options=(option,)))
        for known in self.case.problem.classes:
            rest = tuple(position for position in known.positions if position >= count)
            if rest:
                classes.append(replace(known, positions=rest))
        return replace(self.case.problem, classes=tuple(classes))

    @cached_property
    def _movable(self) -> tuple[int, ...]:
        """For each block the bytes that it saves in one round and that may move."""
        total = [0] * len(self.layout.blocks)
        for number in range(len(self.layout.blocks)):
            made = {op.index for op in self.layout.ops(number, "forward")}
            total[number] = sum(
                s.size_bytes
                for s in self.graph.storages
                if s.saved and s.born in made and s.size_bytes >= LEAST_BYTES
            )
        return tuple(-(-size // self.layout.passes) for size in total)

    def _transfer(self, count: int) -> tuple[float, float]:
        """Seconds that offloading the first blocks adds; and those of them that no operator shows."""
        moved = self.layout.passes * sum(self._movable[:count])
        link = link_seconds(moved, self.bench.gpu)
        forward = phase_seconds(self.graph, self._seconds, "forward")
        own = [op.index for block in range(count) for op in self.layout.ops(block, "backward")]
        hidden = exposed(link, forward) + exposed(link, sum(self._seconds[index] for index in own))
        return hidden + 2 * copy_seconds(moved, self.bench.gpu), hidden

    def _run(self, thought: _Thought) -> Try:
        names = self.case.problem.blocks[: thought.count]
        offload: Settings = {"technique": "activation_offload", "blocks": list(names)}
        recomputes = any(saves is not None for saves in thought.schedule[: thought.count])
        moved = 0 if recomputes else sum(self._movable[: thought.count])
        lever = self.case.lever
        made = replace(
            lever,
            name=", ".join(filter(None, (f"{thought.count} blocks offloaded", lever.name))),
            settings=(offload, *lever.settings),
            host_seconds=lever.host_seconds + (0.0 if recomputes else self._transfer(thought.count)[1]),
            host_bytes=lever.host_bytes + moved,
        )
        return self.bench.evaluate("planned", made, thought.schedule, thought.seconds)
