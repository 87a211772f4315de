"""Which results of a compiled graph's forward to keep, so that its live bytes stay under a peak at the
least time of running operators again: a mixed-integer program (HiGHS through scipy), and a replay that
corrects it. No torch.

The forward is cut into segments where few bytes cross. With ``s`` (storage kept) and ``r`` (operator run
again for the backward of its own segment, or of one a little later in the forward, from which its results
then stay) in {0, 1}:

    s_v + Σ_j r_op,j ≥ 1            for each storage v that the backward reads, and its operator
    r_op,j ≤ s_u + Σ_(j' ≥ j) r_op',j'   for each input u of op, made by op'
    Σ (kept and still needed) + Σ (run again, there) ≤ peak − (gradients and temporaries)   at each segment
    minimise Σ seconds_op r_op

`activation_memory_budget`, PyTorch's own knob, bounds the bytes that are kept instead, which is another
thing: its peak rises again as the budget falls, since long chains of recomputation hold their results
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memfit.core.standard_output import standard_output_aside
from memfit.techniques.joint_replay import JointStep, Replay, replay

if TYPE_CHECKING:
    from memfit.techniques.program_rows import Rows

SEGMENTS = 48
REACH = 2
"""By how many segments before its own an operator may be run again."""
ROUNDS = 4
ENOUGH_SHARE = 0.02
"""By how much of its time a cut must be better than the last one for another round."""
RELATIVE_GAP = 0.005
MOST_NODES = 20
TIME_LIMIT_SECONDS = 60.0
"""Far from being reached: the number of nodes ends a hard program, so that a slow machine gets the same
answer."""
EARLY_SHARE = 0.1
STEP_SHARE = 0.002
"""By how much of the peak less is allowed where a replay exceeds it."""
_TIE_BREAK = 1e-4
_MIB = 2.0**20


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is kept, and what that means. ``seconds`` are those of the operators that run again."""

    kept: frozenset[int]
    seconds: float
    replay: Replay


def keep_all(step: JointStep) -> frozenset[int]:
    """Everything that the backward reads."""
    return step.needed


def choose(
    step: JointStep, seconds: Sequence[float], peak_bytes: int, known: Iterable[frozenset[int]] = ()
) -> Cut | None:
    """The cut of least time whose replay stays within ``peak_bytes``; None where none was found.

    Args:
        seconds: of each operator of the step.
        peak_bytes: of live bytes, as `Replay.peak_bytes` counts them.
        known: what other choices keep; the answer is no worse than the best of them.
    """
    whole = _cut(step, seconds, keep_all(step))
    if whole.replay.peak_bytes <= peak_bytes:
        return whole
    program = _Program(step, seconds)
    slack = np.zeros(len(program.fixed_bytes))
    fitting = [cut for cut in _cuts(step, seconds, known) if cut.replay.peak_bytes <= peak_bytes]
    best = min(fitting, key=lambda cut: cut.seconds, default=None)
    last: Cut | None = None
    for number in range(ROUNDS):
        solution = program.solve(peak_bytes + slack)
        if solution is None and number == 0:
            solution = program.solve(None)  # the leanest by its own sums, which may be too high
        if solution is None:
            break
        found = _cut(step, seconds, solution.kept)
        fits = found.replay.peak_bytes <= peak_bytes
        if fits and (best is None or found.seconds < best.seconds):
            best = found
        if fits and last is not None and found.seconds >= last.seconds * (1 - ENOUGH_SHARE):
            break
        last = found if fits else last
        slack = _next_slack(slack, solution.sums_bytes, program.held(found.replay), peak_bytes)
    return best


def _next_slack(
    slack: npt.NDArray[np.float64],
    sums: npt.NDArray[np.float64],
    held: npt.NDArray[np.float64],
    peak_bytes: int,
) -> npt.NDArray[np.float64]:
    """By how much the program's sum may exceed the peak at each position: by what it lies over the replay
    there, and less where that is too much already."""
    over = held > peak_bytes
    seen: npt.NDArray[np.float64] = sums - held
    return np.where(over, np.minimum(slack, seen) - STEP_SHARE * peak_bytes, seen)


def least(step: JointStep, seconds: Sequence[float], known: Iterable[frozenset[int]] = ()) -> Cut:
    """The cut of the lowest peak, as far as one program finds it, or the leanest of those that are known."""
    solution = _Program(step, seconds).solve(None)
    found = [] if solution is None else [solution.kept]
    cuts = _cuts(step, seconds, [keep_all(step), *found, *known])
    return min(cuts, key=lambda cut: (cut.replay.peak_bytes, cut.seconds))


def _cuts(step: JointStep, seconds: Sequence[float], kept: Iterable[frozenset[int]]) -> list[Cut]:
    return [_cut(step, seconds, each) for each in dict.fromkeys(kept)]


def _cut(step: JointStep, seconds: Sequence[float], kept: frozenset[int]) -> Cut:
    run = replay(step, kept)
    return Cut(kept=kept, seconds=sum(seconds[number] for number in run.again), replay=run)


@dataclass(frozen=True, kw_only=True)
class _Solution:
    """What a program keeps, and its own sum of bytes at each position."""

    kept: frozenset[int]
    sums_bytes: npt.NDArray[np.float64]


class _Program:
    """The mixed-integer program of a step, before the peak is known."""

    def __init__(self, step: JointStep, seconds: Sequence[float]) -> None:
        self.step = step
        self.segment = _segments(step)
        self.makers = _relevant(step)
        self.storages = sorted({s for op in self.makers for s in step.ops[op].outputs})
        self.position_of, self.fixed_bytes, self.reads = _positions(step, self.segment)
        self.positions = len(self.fixed_bytes)
        self.last_in_forward = _last_in_forward(step)
        self.moments, passing = _moments(step, self.segment, self.last_in_forward)
        self.fixed_bytes += passing
        self.seconds = seconds
        self._number()
        self._low, self._matrix = self._constraints()

    def _number(self) -> None:
        """Columns: kept storages first, then each operator for each segment that it can be run again for."""
        self.keep = {storage: column for column, storage in enumerate(self.storages)}
        self.again: dict[tuple[int, int], int] = {}
        self.reaches: dict[int, list[int]] = {}
        after_loss = max(_after_loss(self.step, self.segment) - 1, 0)
        for op in self.makers:
            if op in self.step.fixed:
                continue
            first = self.segment[op]
            near = range(first, min(first + REACH, self.positions - 1) + 1)
            read = {self.reads[s][0] for s in self.step.ops[op].outputs if s in self.reads}
            self.reaches[op] = sorted({*near, *(p for p in (*read, after_loss) if p > first)})
            for position in self.reaches[op]:
                self.again[op, position] = len(self.keep) + len(self.again)

    def solve(self, room_bytes: npt.NDArray[np.float64] | None) -> _Solution | None:
        """What to keep so that the sum at each position is within ``room_bytes``; of the least sum for None.
        None where it finds nothing."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        width = len(self.keep) + len(self.again) + 1  # the last column is the peak, where it is sought
        fixed = np.array(self.fixed_bytes, dtype=float)
        room = np.zeros(len(fixed)) if room_bytes is None else room_bytes
        high = np.concatenate([np.full(len(self._low), np.inf), (room - fixed) / _MIB])
        low = np.concatenate([self._low, np.full(len(fixed), -np.inf)])
        most = np.append(np.ones(width - 1), np.inf if room_bytes is None else 0.0)
        options = {
            "mip_rel_gap": RELATIVE_GAP,
            "node_limit": MOST_NODES,
            "time_limit": TIME_LIMIT_SECONDS,
        }
        with standard_output_aside():  # some paths of HiGHS print a line whatever they are told
            result = milp(
                self._costs(width, peak_is_free=room_bytes is None),
                constraints=LinearConstraint(self._matrix, low, high),
                bounds=Bounds(0, most),
                integrality=np.append(np.ones(width - 1), 0),
                options=options,
            )
        if result.x is None:
            return None
        chosen = np.append(np.rint(result.x[:-1]), 0.0)
        sums = (self._matrix @ chosen)[len(self._low) :] * _MIB + fixed
        kept = frozenset(storage for storage, column in self.keep.items() if chosen[column] > 0)
        return _Solution(kept=kept, sums_bytes=sums)

    def held(self, run: Replay) -> npt.NDArray[np.float64]:
        """The most live bytes of a replay at each position of the backward, where what runs again counts
        where it is needed, and in each segment of the forward."""
        most = np.zeros(self.positions + len(self.moments))
        at = self.positions - 1
        turn = self.step.forward_count
        for place in range(len(run.order) - 1, turn - 1, -1):
            if run.order[place] >= turn:
                at = self.position_of[run.order[place] - turn]
            most[at] = max(most[at], run.live_bytes[place])
        for place, segment in enumerate(self.segment):
            at = self.positions + segment
            most[at] = max(most[at], run.live_bytes[place])
        return most

    def _constraints(self) -> tuple[npt.NDArray[np.float64], Any]:
        """Lower bounds of the rows of needs and inputs; those rows, and below them one for each position."""
        from memfit.techniques.program_rows import Rows

        rows = Rows()
        self._add_needs(rows)
        self._add_inputs(rows)
        low = np.array(rows.low)
        self._add_memory(rows)
        width = len(self.keep) + len(self.again) + 1
        return low, rows.matrix(width)

    def _again(self, op: int, least: int = 0) -> list[int]:
        return [self.again[op, p] for p in self.reaches.get(op, ()) if p >= least]

    def _add_needs(self, rows: Rows) -> None:
        """What the backward reads is kept, or made again not later than it is first read."""
        for storage in self.step.needed:
            maker = self.step.born[storage]
            again = self._again(maker, self.reads[storage][0])
            rows.add([(self.keep[storage], 1.0), *((column, 1.0) for column in again)], 1.0, np.inf)

    def _add_inputs(self, rows: Rows) -> None:
        """An operator that runs again finds its inputs kept, or made again by then."""
        for (op, position), column in self.again.items():
            for storage in self.step.ops[op].inputs:
                if not self.step.is_forward(storage):
                    continue
                terms = [(self.keep[storage], 1.0), (column, -1.0)]
                terms += [(c, 1.0) for c in self._again(self.step.born[storage], position)]
                rows.add(terms, 0.0, np.inf)

    def _add_memory(self, rows: Rows) -> None:
        """What is held at each position beside its fixed bytes, in MiB, less the peak where it is sought:
        first in the backward, then in the forward."""
        peak_column = len(self.keep) + len(self.again)
        for position in range(self.positions):
            terms = [(peak_column, -1.0)]
            for storage, column in self.keep.items():
                size = self.step.sizes_bytes[storage]
                if self._end(storage) <= position and self.segment[self.step.born[storage]] <= position:
                    terms.append((column, size / _MIB))
            for (op, reach), column in self.again.items():
                held = sum(
                    self.step.sizes_bytes[s]
                    for s in self.step.ops[op].outputs
                    if s in self.reads and self.reads[s][1] <= position <= reach
                )
                if held:
                    terms.append((column, held / _MIB))
            rows.add(terms, -np.inf, np.inf)
        for moment in self.moments:
            kept = [
                (column, self.step.sizes_bytes[storage] / _MIB)
                for storage, column in self.keep.items()
                if self.step.born[storage] <= moment and self.last_in_forward[storage] < moment
            ]
            rows.add([(peak_column, -1.0), *kept], -np.inf, np.inf)

    def _end(self, storage: int) -> int:
        """The position at which a kept storage is read last: by the backward, or by what runs again."""
        readers = [self.segment[op] for op in self._readers[storage]]
        if storage in self.reads:
            readers.append(self.reads[storage][1])
        return min(readers, default=self.segment[self.step.born[storage]])

    @cached_property
    def _readers(self) -> Mapping[int, list[int]]:
        """The operators that read each storage, among those that can be involved."""
        read_by: dict[int, list[int]] = defaultdict(list)
        for op in self.makers:
            for storage in self.step.ops[op].inputs:
                read_by[storage].append(op)
        return read_by

    def _costs(self, width: int, *, peak_is_free: bool) -> npt.NDArray[np.float64]:
        costs = np.zeros(width)
        if peak_is_free:
            costs[-1] = 1.0
            return costs
        scale = max((self.seconds[op] for op in self.makers), default=0.0) or 1.0
        total = sum(self.step.sizes_bytes[s] for s in self.storages) or 1
        for storage, column in self.keep.items():
            costs[column] = _TIE_BREAK * self.step.sizes_bytes[storage] / total
        for (op, position), column in self.again.items():
            early = position - self.segment[op]
            costs[column] = self.seconds[op] / scale + _TIE_BREAK * (1 + early) / len(self.again)
        return costs


def _relevant(step: JointStep) -> list[int]:
    """The forward's operators that running again can involve."""
    makers: set[int] = set()
    waiting = list(step.needed)
    while waiting:
        op = step.born[waiting.pop()]
        if op not in makers:
            makers.add(op)
            if op not in step.fixed:
                waiting += [s for s in step.ops[op].inputs if step.is_forward(s)]
    return sorted(makers)


def _after_loss(step: JointStep, segment: Sequence[int]) -> int:
    """The latest position before which a tenth of all needed bytes is gone, as those of a loss over a
    vocabulary: cheap chains over the whole forward may be run again there, so that nothing of them is held
    at the turn."""
    made = np.zeros(max(segment, default=0) + 1)
    for storage in step.needed:
        made[segment[step.born[storage]]] += step.sizes_bytes[storage]
    gone = np.cumsum(made[::-1])[::-1]
    return max((p for p in range(len(made)) if gone[p] >= EARLY_SHARE * made.sum()), default=0)


def _last_in_forward(step: JointStep) -> dict[int, int]:
    """The forward's last operator that makes or reads each storage."""
    last: dict[int, int] = {}
    for number, op in enumerate(step.ops[: step.forward_count]):
        last.update(dict.fromkeys((*op.inputs, *op.outputs), number))
    return last


def _moments(step: JointStep, segment: Sequence[int], last: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Of each segment of the forward the operator at which most bytes are there that no cut changes, and
    those bytes: results still to be read in the forward, or given to its caller."""
    count = step.forward_count
    change = np.zeros(count + 1, np.int64)
    for storage, end in last.items():
        if step.is_forward(storage):
            change[step.born[storage]] += step.sizes_bytes[storage]
            change[(count - 1 if storage in step.outputs else end) + 1] -= step.sizes_bytes[storage]
    passing = np.cumsum(change)[:count]
    moments: dict[int, int] = {}
    for number in range(count):
        best = moments.setdefault(segment[number], number)
        if passing[number] > passing[best]:
            moments[segment[number]] = number
    return list(moments.values()), [int(passing[number]) for number in moments.values()]


def _segments(step: JointStep) -> list[int]:
    """For each operator of the forward its segment: about equal in needed bytes, cut where few bytes
    cross."""
    count = step.forward_count
    change = np.zeros(count + 1, np.int64)
    for storage, end in _last_in_forward(step).items():
        if step.is_forward(storage):
            change[step.born[storage]] += step.sizes_bytes[storage]
            change[end] -= step.sizes_bytes[storage]
    crossing = np.cumsum(change)[:count]
    made = np.array(
        [sum(step.sizes_bytes[s] for s in op.outputs if s in step.needed) for op in step.ops[:count]]
    )
    upto = np.cumsum(made)
    target = max(int(upto[-1]) if count else 0, 1) / SEGMENTS
    cuts: list[int] = []
    start = 0
    while start < count:
        base = upto[start - 1] if start else 0
        window = [n for n in range(start, count) if 0.5 * target <= upto[n] - base]
        window = [n for n in window if upto[n] - base <= 1.5 * target] or window[:1]
        if not window or window[-1] >= count - 1:
            break
        cut = min(window, key=lambda n: (int(crossing[n]), -n))
        cuts.append(cut)
        start = cut + 1
    return [int(number) for number in np.searchsorted(cuts, np.arange(count))]


def _positions(
    step: JointStep, segment: Sequence[int]
) -> tuple[list[int], list[int], dict[int, tuple[int, int]]]:
    """The backward in positions, one for each segment: that of each of its operators, what else each position
    holds at most, and where the backward reads each needed storage first and last.

    The backward goes through the segments in reverse: the positions are the non-increasing numbers nearest
    to the latest segment that each operator reads of (some read a mask from far before, some add up late).
    """
    whole = replay(step, step.needed)
    count, turn = (segment[-1] if segment else 0) + 1, step.forward_count
    backward = step.ops[turn:]
    latest = [
        max((segment[step.born[s]] for s in op.inputs if s in step.needed), default=-1) for op in backward
    ]
    position = _non_increasing(latest, count - 1)
    uses: dict[int, tuple[int, int]] = {}
    last_place: dict[int, int] = {}
    for place, op in enumerate(backward):
        for s in op.inputs:
            if s in step.needed:
                uses[s] = (uses.get(s, (position[place], 0))[0], position[place])
                last_place[s] = place
    kept = np.zeros(len(backward) + 1, np.int64)
    for s, place in last_place.items():
        kept[0] += step.sizes_bytes[s]
        kept[place + 1] -= step.sizes_bytes[s]
    other = whole.live_bytes[turn:] - np.cumsum(kept)[: len(backward)]
    fixed = [0] * count
    for place, value in enumerate(other):
        fixed[position[place]] = max(fixed[position[place]], int(value))
    return position, fixed, uses


def _non_increasing(wanted: Sequence[int], start: int) -> list[int]:
    """The non-increasing sequence of least total difference from ``wanted``; -1 there wants nothing.

    By pooling neighbours that are out of order into one value, their median.
    """
    pools: list[tuple[list[int], int]] = []  # values, sorted, and how many places they stand for
    for value in wanted:
        pools.append(([value] if value >= 0 else [], 1))
        while len(pools) > 1 and _out_of_order(pools[-2][0], pools[-1][0]):
            after, before = pools.pop(), pools.pop()
            pools.append((sorted(before[0] + after[0]), before[1] + after[1]))
    result: list[int] = []
    current = start
    for values, places in pools:
        current = min(current, _median(values)) if values else current
        result += [current] * places
    return result


def _out_of_order(before: Sequence[int], after: Sequence[int]) -> bool:
    return not after or (bool(before) and _median(after) > _median(before))


def _median(values: Sequence[int]) -> int:
    return values[len(values) // 2]
