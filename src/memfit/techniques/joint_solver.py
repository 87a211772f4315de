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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.techniques.joint_replay import JointStep, Replay, replay

SEGMENTS = 48
REACH = 2
"""By how many segments before its own an operator may be run again."""
ROUNDS = 8
RELATIVE_GAP = 0.005
MOST_NODES = 20
TIME_LIMIT_SECONDS = 60.0
"""Far from being reached: the number of nodes ends a hard program, so that a slow machine gets the same
answer."""
TIGHT_SHARE = 0.98
"""A cut that uses this part of the peak is not improved further."""
_TIE_BREAK = 1e-4


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is kept, and what that means. ``seconds`` are those of the operators that run again."""

    kept: frozenset[int]
    seconds: float
    replay: Replay


def keep_all(step: JointStep) -> frozenset[int]:
    """Everything that the backward reads."""
    return step.needed


def choose(step: JointStep, seconds: Sequence[float], peak_bytes: int) -> Cut | None:
    """The cut of least time whose replay stays within ``peak_bytes``; None where none was found.

    Args:
        seconds: of each operator of the step.
        peak_bytes: of live bytes, as `Replay.peak_bytes` counts them.
    """
    whole = _cut(step, seconds, keep_all(step))
    if whole.replay.peak_bytes <= peak_bytes:
        return whole
    program = _Program(step, seconds)
    best: Cut | None = None
    allowance, failing = peak_bytes, 0
    for _ in range(ROUNDS):
        kept = program.solve(allowance)
        if kept is None:
            break
        found = _cut(step, seconds, kept)
        over = found.replay.peak_bytes - peak_bytes
        if over <= 0 and (best is None or found.seconds < best.seconds):
            best = found
        if over > 0:
            failing = min(failing or allowance, allowance)
            allowance -= max(over, peak_bytes // 100)
        elif found.seconds == 0 or found.replay.peak_bytes >= TIGHT_SHARE * peak_bytes:
            break
        else:
            more = allowance - over
            allowance = min(more, (allowance + failing) // 2) if failing else more
    return best


def least(step: JointStep, seconds: Sequence[float]) -> Cut:
    """The cut of the lowest peak, as far as one program finds it."""
    whole = _cut(step, seconds, keep_all(step))
    kept = _Program(step, seconds).solve(None)
    found = whole if kept is None else _cut(step, seconds, kept)
    return min((whole, found), key=lambda cut: cut.replay.peak_bytes)


def _cut(step: JointStep, seconds: Sequence[float], kept: frozenset[int]) -> Cut:
    run = replay(step, kept)
    return Cut(kept=kept, seconds=sum(seconds[number] for number in run.again), replay=run)


class _Program:
    """The mixed-integer program of a step, before the peak is known."""

    def __init__(self, step: JointStep, seconds: Sequence[float]) -> None:
        self.step = step
        self.segment = _segments(step)
        self.makers = _relevant(step)
        self.storages = sorted({s for op in self.makers for s in step.ops[op].outputs})
        self.positions, self.fixed_bytes, self.reads = _positions(step, self.segment)
        self.seconds = seconds
        self._number()

    def _number(self) -> None:
        """Columns: kept storages first, then each operator for each segment that it can be run again for."""
        self.keep = {storage: column for column, storage in enumerate(self.storages)}
        self.again: dict[tuple[int, int], int] = {}
        self.reaches: dict[int, range] = {}
        for op in self.makers:
            if op in self.step.fixed:
                continue
            first = self.segment[op]
            self.reaches[op] = range(first, min(first + REACH, self.positions - 1) + 1)
            for position in self.reaches[op]:
                self.again[op, position] = len(self.keep) + len(self.again)

    def solve(self, peak_bytes: int | None) -> frozenset[int] | None:
        """What to keep, within ``peak_bytes`` by the program's own sum; of the lowest peak for None. None
        where it finds nothing."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows = _Rows()
        self._add_needs(rows)
        self._add_inputs(rows)
        self._add_memory(rows, peak_bytes)
        width = len(self.keep) + len(self.again) + 1  # the last column is the peak, where it is sought
        free = peak_bytes is None
        matrix = coo_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.low), width)).tocsr()
        result = milp(
            self._costs(width, free),
            constraints=LinearConstraint(matrix, rows.low, rows.high),
            bounds=Bounds(0, np.append(np.ones(width - 1), np.inf if free else 0.0)),
            integrality=np.append(np.ones(width - 1), 0),
            options={
                "mip_rel_gap": RELATIVE_GAP,
                "node_limit": MOST_NODES,
                "time_limit": TIME_LIMIT_SECONDS,
            },
        )
        if result.x is None:
            return None
        return frozenset(storage for storage, column in self.keep.items() if result.x[column] > 0.5)

    def _again(self, op: int, least: int = 0) -> list[int]:
        return [self.again[op, p] for p in self.reaches.get(op, ()) if p >= least]

    def _add_needs(self, rows: _Rows) -> None:
        """What the backward reads is kept, or made again not later than it is first read."""
        for storage in self.step.needed:
            maker = self.step.born[storage]
            first_read = self.reads[storage][0]
            least = min(first_read, max(self.reaches.get(maker, (0,))))
            rows.add([(self.keep[storage], 1.0), *((c, 1.0) for c in self._again(maker, least))], 1.0, np.inf)

    def _add_inputs(self, rows: _Rows) -> None:
        """An operator that runs again finds its inputs kept, or made again by then."""
        for (op, position), column in self.again.items():
            for storage in self.step.ops[op].inputs:
                if not self.step.is_forward(storage):
                    continue
                terms = [(self.keep[storage], 1.0), (column, -1.0)]
                terms += [(c, 1.0) for c in self._again(self.step.born[storage], position)]
                rows.add(terms, 0.0, np.inf)

    def _add_memory(self, rows: _Rows, peak_bytes: int | None) -> None:
        mib = 2.0**20
        peak_column = len(self.keep) + len(self.again)
        for position in range(self.positions):
            terms = [(peak_column, -1.0)]
            for storage, column in self.keep.items():
                size = self.step.sizes_bytes[storage]
                if self._end(storage) <= position and self.segment[self.step.born[storage]] <= position:
                    terms.append((column, size / mib))
            for (op, reach), column in self.again.items():
                held = sum(
                    self.step.sizes_bytes[s]
                    for s in self.step.ops[op].outputs
                    if s in self.reads and self.reads[s][1] <= position <= reach
                )
                if held:
                    terms.append((column, held / mib))
            rows.add(terms, -np.inf, ((peak_bytes or 0) - self.fixed_bytes[position]) / mib)

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

    def _costs(self, width: int, peak_is_free: bool) -> npt.NDArray[np.float64]:
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


class _Rows:
    """Sparse rows of a linear constraint."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)


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


def _segments(step: JointStep) -> list[int]:
    """For each operator of the forward its segment: about equal in needed bytes, cut where few bytes
    cross."""
    count = step.forward_count
    change = np.zeros(count + 1, np.int64)
    last: dict[int, int] = {}
    for number, op in enumerate(step.ops[:count]):
        last.update(dict.fromkeys((*op.inputs, *op.outputs), number))
    for storage, end in last.items():
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


def _positions(step: JointStep, segment: Sequence[int]) -> tuple[int, list[int], dict[int, tuple[int, int]]]:
    """The backward in positions, one for each segment: how many, what else each holds at most, and where the
    backward reads each needed storage first and last.

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
    return count, fixed, uses


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
