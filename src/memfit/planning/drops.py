"""Which results to drop and compute again, operator by operator: a mixed-integer program over a step.

For each operator whose results may be dropped, ``k`` says whether they are kept. For each moment ``t`` of the
backward pass that is looked at, and for the end of the step, ``a[op, t]`` says whether an operator has run
again by then:

    k_v + a[op, t] ≥ 1              v is read by a backward operator up to t, op writes v
    a[op, t] ≤ k_u + a[op', t]      op reads u, op' writes u before op
    Σ size_v present[v, t] ≤ budget − (what else is there at t)
    minimise Σ seconds_op a[op, end]

``present[v, t]`` is 1 for what was asked for before ``t`` and is still needed; for the rest it is ``k_v``, or
1 where it was computed on the way to something else by then. So memory is checked at the turn from forward to
backward and in every block's backward. Only ``k`` is integral: all else follows from it.

What the sums leave out (temporaries on the way) shows when the step is played with the choice
(`memfit.techniques.recomputed_steps`). A moment where that exceeds the budget is added, or its room made
smaller by the excess, and the program solved again; at last what fits without it is kept after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds

from memfit.capture.graph import StepGraph
from memfit.planning.highs import minimise
from memfit.techniques.dropped_lives import dropped_lives
from memfit.techniques.operation_names import enclosing_block
from memfit.techniques.program_rows import Rows
from memfit.techniques.recomputed_steps import Played, RecomputedStep

RELATIVE_GAP = 0.01
MOST_NODES = 100
"""The program stops at a number of nodes rather than at a time, so that a slow machine gets the same plan."""
TIME_LIMIT_SECONDS = 60.0
MOST_MOMENTS = 12
ROUNDS = 6
LEAN_ROUNDS = 6
LEAST_BYTES = 64 << 10
"""Smaller results are kept, unless their operator's large ones are dropped."""
_END = 1 << 60
_MIB = 2.0**20


@dataclass(frozen=True, kw_only=True)
class Drops:
    """A choice: makers whose results are dropped or kept, what that costs, and the step played with it."""

    kept: frozenset[int]
    seconds: float
    played: Played

    @property
    def peak_bytes(self) -> int:
        """Of the step played."""
        return self.played.peak_bytes


@dataclass
class DropProgram:
    """The program of one step; it remembers the moments that turned out to matter.

    Args:
        step: the plain step.
        seconds: of each of its operators.
    """

    step: RecomputedStep
    seconds: Sequence[float]
    lives: dict[int, int] | None = field(default=None, init=False)
    """How long dropped results stay all the same, once that is learned."""
    _moments: set[int] = field(default_factory=set)
    _less: dict[int, int] = field(default_factory=dict)
    _solutions: dict[int, Drops | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._moments = set(self._first_moments())

    @cached_property
    def saved(self) -> dict[int, tuple[int, ...]]:
        """For each operator that may be kept or not, what it makes that the plain step saves."""
        return self._large(self.step.candidates)

    @cached_property
    def extras(self) -> dict[int, tuple[int, ...]]:
        """The same of what the plain step does not save, and others are made from."""
        return self._large(self.step.extras)

    def _large(self, storages: Sequence[int]) -> dict[int, tuple[int, ...]]:
        made: dict[int, list[int]] = {}
        for storage in storages:
            made.setdefault(self.step.writers[storage][0], []).append(storage)
        return {op: tuple(them) for op, them in made.items() if op in self._large_makers}

    @cached_property
    def _large_makers(self) -> frozenset[int]:
        """Operators of whose results one is large."""
        return frozenset(
            self.step.writers[s][0]
            for s in (*self.step.candidates, *self.step.extras)
            if self._size(s) >= LEAST_BYTES
        )

    @cached_property
    def makers(self) -> tuple[int, ...]:
        """All operators that may be kept or not."""
        return tuple(sorted({*self.saved, *self.extras}))

    @cached_property
    def plain(self) -> frozenset[int]:
        """The choice that is the plain step: everything saved is kept, nothing else."""
        return frozenset(self.saved)

    def _size(self, storage: int) -> int:
        return self.step.graph.storages[storage].size_bytes

    def learn(self, dropped: StepGraph | None) -> None:
        """Takes from the step captured with everything dropped (`nothing_kept`) how long Python holds
        results; None where it could not be captured."""
        step = self.step
        self.lives = {} if dropped is None else dropped_lives(step.graph, dropped)
        self.step = RecomputedStep(step.graph, step.blocks, self.lives)
        self._solutions.clear()

    def lives_in_python(self) -> dict[int, int]:
        """Of what can be made again, what is known to be held by Python alone, and until when in the forward
        pass."""
        last = max((op.index for op in self.step.forward), default=-1)
        lives = self.lives or {}
        return {s: until for s, until in lives.items() if s in self.step.recomputable and until < last}

    def nothing_kept(self) -> dict[str, tuple[str, ...]]:
        """The settings that drop all that may be dropped."""
        return self.keeps(frozenset())

    def play(self, kept: frozenset[int]) -> Drops:
        """The step with a choice."""
        played = self.step.play(kept | self._small)
        return Drops(kept=kept, seconds=sum(self.seconds[op] for op in played.run_again), played=played)

    def keeps(self, kept: frozenset[int]) -> dict[str, tuple[str, ...]]:
        """The settings of a choice: for each block the names of the operators that it keeps."""
        return self.step.keeps(kept | self._small)

    @cached_property
    def _small(self) -> frozenset[int]:
        makers = {self.step.writers[s][0] for s in self.step.candidates}
        return frozenset(makers - self._large_makers)

    def solve(self, budget_bytes: int) -> Drops | None:
        """The choice of least recomputation whose step, played, stays within ``budget_bytes``; None where the
        program has none. It may still exceed the budget when rounds run out."""
        if budget_bytes not in self._solutions:
            self._solutions[budget_bytes] = self._solve(budget_bytes)
        return self._solutions[budget_bytes]

    def _solve(self, budget_bytes: int) -> Drops | None:
        best: Drops | None = None
        for _ in range(ROUNDS):
            kept = self._solved(budget_bytes)
            if kept is None:
                break
            found = self.play(kept)
            if best is None or found.peak_bytes < best.peak_bytes:
                best = found
            excess = found.peak_bytes - budget_bytes
            if excess <= 0:
                best = self._with_more_kept(found, budget_bytes)
                break
            at = found.played.peak_index
            if self.step.graph.ops[at].phase not in ("forward", "backward"):
                break
            if at in self._moments:
                self._less[at] = self._less.get(at, 0) + excess
            self._moments.add(at)
        self._less.clear()
        return best

    def _with_more_kept(self, found: Drops, budget_bytes: int) -> Drops:
        """What fits without it is kept after all, what saves most time first."""
        for op in sorted(
            (op for op in self.saved if op not in found.kept), key=lambda op: (-self.seconds[op], op)
        ):
            if found.peak_bytes + max(map(self._size, self.saved[op])) > budget_bytes:
                continue
            more = self.play(found.kept | {op})
            if more.peak_bytes <= budget_bytes and more.seconds < found.seconds:
                found = more
        return found

    def lean(self, share: float) -> Drops | None:
        """The choice for the least peak and this share of what lies between it and the plain step's."""
        low = self.leanest().peak_bytes
        return self.solve(low + int(share * (self.step.graph.peak_bytes - low)))

    def leanest(self) -> Drops:
        """A choice of nearly the least peak, by bisection."""
        low, high = 0, self.step.graph.peak_bytes
        best = self.play(self.plain)
        for _ in range(LEAN_ROUNDS):
            middle = (low + high) // 2
            found = self.solve(middle)
            if found is not None and found.peak_bytes < best.peak_bytes:
                best = found
            fits = found is not None and found.peak_bytes <= middle
            low, high = (low, middle) if fits else (middle, min(high, best.peak_bytes))
        return best

    def _first_moments(self) -> list[int]:
        """For each block's backward, and the part before all of them, the operator where most is there if
        only that block's own results are."""
        graph, step = self.step.graph, self.step
        alone = self._without_candidates
        number = {name: n for n, name in enumerate(step.blocks)}
        stretches: dict[str, list[int]] = {}
        for op in graph.ops:
            if op.phase == "backward":
                stretches.setdefault(enclosing_block(op.module, number) or "", []).append(op.index)
        own: dict[str, list[int]] = {name: [] for name in stretches}
        for maker, made in self.saved.items():
            own.setdefault(step.block_of[maker] or "", []).extend(made)
        moments = [
            max(ops, key=lambda at, name=name: alone[at] + self._there(own[name], at))  # type: ignore[misc]
            for name, ops in stretches.items()
        ]
        chosen = np.linspace(0, len(moments) - 1, min(len(moments), MOST_MOMENTS)).round().astype(int)
        worst = max(
            (op.index for op in graph.ops if op.phase == "backward"), key=lambda at: graph.live_bytes[at]
        )
        return [worst, *(sorted(moments)[n] for n in chosen)]

    def _there(self, storages: Sequence[int], at: int) -> int:
        return sum(self._size(s) for s in storages if self.step.storage_dies(s) >= at)

    @cached_property
    def _without_candidates(self) -> npt.NDArray[np.int64]:
        """What is live in the plain step beside what may be dropped."""
        graph = self.step.graph
        change = np.zeros(len(graph.ops) + 1, np.int64)
        for made in self.saved.values():
            for storage in made:
                change[graph.storages[storage].born] -= self._size(storage)
                change[self.step.storage_dies(storage) + 1] += self._size(storage)
        live: npt.NDArray[np.int64] = graph.live_bytes + np.cumsum(change)[: len(graph.ops)]
        return live

    def least_seconds(self, budget_bytes: int) -> float:
        """No choice within the budget recomputes for less: of the program as far as it is known, relaxed.
        Infinite where it has no solution."""
        solved = self._minimised(budget_bytes, integral=False)
        if solved is None or solved[1].x is None:
            return float("inf")
        program, result = solved
        return sum(seconds * float(result.x[column]) for column, seconds in program.seconds.items())

    def _solved(self, budget_bytes: int) -> frozenset[int] | None:
        solved = self._minimised(budget_bytes, integral=True)
        if solved is None or solved[1].x is None:
            return None
        program, result = solved
        return frozenset(op for op, column in program.kept.items() if result.x[column] > 0.5)

    def _minimised(self, budget_bytes: int, *, integral: bool) -> tuple[_Program, Any] | None:
        """The program at the moments known, and what the solver says; None where the optimizer alone needs
        more."""
        graph = self.step.graph
        if any(int(graph.live_bytes[op.index]) > budget_bytes for op in graph.ops if op.phase == "optimizer"):
            return None
        program = _Program(self)
        for at in sorted(self._moments):
            program.add_moment(at, budget_bytes - self._less.get(at, 0))
        program.add_end()
        result = minimise(
            program.costs(),
            constraint=program.rows.constraint(program.width),
            bounds=Bounds(0, 1),
            integral=program.integral() if integral else False,
            options={
                "mip_rel_gap": RELATIVE_GAP, "node_limit": MOST_NODES, "time_limit": TIME_LIMIT_SECONDS
            },
        )  # fmt: skip
        return program, result


class _Program:
    """Rows and columns for some moments."""

    def __init__(self, owner: DropProgram) -> None:
        self.owner = owner
        self.step = owner.step
        self.kept = {op: column for column, op in enumerate(owner.makers)}
        self.width = len(self.kept)
        self.rows = Rows()
        self._again: dict[tuple[int, int], int] = {}
        self._staying: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    def add_moment(self, at: int, budget_bytes: int) -> None:
        """Memory at one operator of the forward or backward pass."""
        owner, step = self.owner, self.step
        self._add_needs(at)
        room = budget_bytes - int(owner._without_candidates[at])
        terms: list[tuple[int, float]] = []
        for made in owner.extras.values():
            for storage in made:
                if step.storage_dies(storage) < at <= step.needed_until(storage):
                    terms.append((self._stays(storage), owner._size(storage) / _MIB))
        for op, made in owner.saved.items():
            there = [s for s in made if step.storage_dies(s) >= at >= step.graph.storages[s].born]
            anyhow = [s for s in there if step.readers[s][0] <= at or step.there_until[s] >= at]
            later = sum(map(owner._size, there)) - sum(map(owner._size, anyhow))
            room -= sum(map(owner._size, anyhow))
            if later:
                terms.append((self.kept[op], later / _MIB))
            if later and (op, at) in self._again:
                terms.append((self._computed_early(op, at), later / _MIB))
        self.rows.add(terms, -np.inf, room / _MIB)

    def _stays(self, storage: int) -> int:
        """A column that is 1 where an unsaved storage is kept and something made from it is not."""
        if storage not in self._staying:
            column = self._staying[storage] = self._column()
            maker = self.kept[self.step.writers[storage][0]]
            for reader in self.step.consumers[storage]:
                terms = [(column, 1.0), (maker, -1.0)]
                if self.step.maker(reader) in self.kept:
                    terms.append((self.kept[self.step.maker(reader)], 1.0))
                self.rows.add(terms, 0.0, np.inf)
        return self._staying[storage]

    def _computed_early(self, op: int, at: int) -> int:
        """A column that is 1 where ``op``, not kept, has run again by ``at``."""
        column = self._column()
        self.rows.add([(column, 1.0), (self._again[op, at], -1.0), (self.kept[op], 1.0)], 0.0, np.inf)
        return column

    def add_end(self) -> None:
        """What has run again when the step is over: the cost."""
        self._add_needs(_END)
        for (op, at), column in self._again.items():
            if at == _END:
                self.seconds[column] = self.owner.seconds[op]

    def _add_needs(self, at: int) -> None:
        """What was asked for by ``at`` is kept or made again, from what is kept or made again."""
        step = self.step
        waiting: list[int] = []
        for op, made in self.owner.saved.items():
            if min(step.readers[s][0] for s in made) <= at:
                for writer in dict.fromkeys(w for s in made for w in step.writers[s]):
                    self.rows.add(
                        [(self.kept[op], 1.0), (self._run_again(writer, at, waiting), 1.0)], 1.0, np.inf
                    )
        while waiting:
            reader = waiting.pop()
            for storage in step.needs[reader]:
                maker = step.writers[storage][0]
                if maker not in self.kept and step.graph.storages[storage].saved:
                    continue  # small, and kept
                for writer in step.writers[storage]:
                    if writer >= reader:
                        continue
                    terms = [(self._again[reader, at], -1.0), (self._run_again(writer, at, waiting), 1.0)]
                    if self._can_be_kept(maker, storage):
                        terms.append((self.kept[maker], 1.0))
                    self.rows.add(terms, 0.0, np.inf)

    def _can_be_kept(self, maker: int, storage: int) -> bool:
        made = (*self.owner.saved.get(maker, ()), *self.owner.extras.get(maker, ()))
        return storage in made

    def _run_again(self, op: int, at: int, waiting: list[int]) -> int:
        if (op, at) not in self._again:
            self._again[op, at] = self._column()
            waiting.append(op)
        return self._again[op, at]

    def _column(self) -> int:
        self.width += 1
        return self.width - 1

    def costs(self) -> npt.NDArray[np.float64]:
        """Seconds, scaled to about one; of equals the choice that keeps least."""
        costs = np.zeros(self.width)
        for column, seconds in self.seconds.items():
            costs[column] = seconds
        costs /= costs.max(initial=0.0) or 1.0
        sizes = [sum(map(self.owner._size, self._made(op))) for op in self.kept]
        costs[: len(sizes)] += 1e-6 * np.array(sizes, dtype=float) / max(sizes, default=1)
        return costs

    def _made(self, op: int) -> tuple[int, ...]:
        return (*self.owner.saved.get(op, ()), *self.owner.extras.get(op, ()))

    def integral(self) -> npt.NDArray[np.int64]:
        """Which columns are whole numbers."""
        return np.array([1] * len(self.kept) + [0] * (self.width - len(self.kept)))
