"""First fit over known lifetimes: blocks in a good order, each at the lowest place that is free for its life.

A few orders, each improved by promotion: blocks that stick out above the goal move to the front and all are
placed again. On the traces of real training steps this ends within a thousandth of the peak of live bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.allocators.lifetimes import Lifetimes

Column = npt.NDArray[np.int64]

_WORK_OF_PROMOTION = 30_000
"""Blocks placed per order: a large problem gets fewer rounds (at least `_FEWEST_ROUNDS`)."""
_MOST_ROUNDS = 12
_FEWEST_ROUNDS = 4


def best_first_fit(lifetimes: Lifetimes, goal_bytes: int) -> tuple[Column, str]:
    """The lowest packing found, and the name of its order; stops once one is no higher than the goal."""
    best = np.zeros(len(lifetimes), dtype=np.int64)
    if not len(lifetimes):
        return best, "size"
    height, name = -1, ""
    rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, _WORK_OF_PROMOTION // len(lifetimes)))
    for order_name, order in _orders(lifetimes).items():
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        promoted = np.zeros(len(order), dtype=np.int64)
        for _ in range(rounds):
            offsets = first_fit(lifetimes, np.lexsort((rank, -promoted)))
            ends = offsets + lifetimes.size_bytes
            if height < 0 or ends.max() < height:
                best, height, name = offsets, int(ends.max()), order_name
            if height <= goal_bytes:
                return best, name
            promoted[ends > goal_bytes] += 1
    return best, name


def _orders(lifetimes: Lifetimes) -> dict[str, Column]:
    """Orders to place the blocks in; what is left equal goes by length of life, then by birth.

    ``peak`` stacks what is live at the fullest moment by length of life, which leaves no gap there and
    steps beside it, and fills the rest in by size: optimal on most traces of training steps. ``fullest``
    goes by the load of the fullest moment that a block sees, in twentieths, then by area.
    """
    life = lifetimes.upper - lifetimes.lower
    size = lifetimes.size_bytes
    area = size.astype(float) * life
    fullest = lifetimes.fullest_load_bytes
    peak = lifetimes.peak_live_bytes
    at_peak = fullest == peak
    keys: dict[str, tuple[npt.NDArray[Any], ...]] = {
        "peak": (-size, np.where(at_peak, -life, 0), ~at_peak),
        "fullest": (-area, -(fullest // -(-peak // 20))),
        "size": (-size,),
        "life": (-life,),
        "area": (-area,),
    }
    return {name: np.lexsort((lifetimes.lower, -life, *key)) for name, key in keys.items()}


def first_fit(lifetimes: Lifetimes, order: Column) -> Column:
    """Offsets from placing the blocks in this order, each as low as it goes. O(blocks²), in numpy."""
    count = len(order)
    # What is placed already, sorted by offset: four columns in one table, shifted by one slice a block.
    placed = np.empty((4, count), dtype=np.int64)
    start, end, lower, upper = placed
    offsets = np.empty(count, dtype=np.int64)
    columns = (order, lifetimes.lower[order], lifetimes.upper[order], lifetimes.size_bytes[order])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for used, (block, born, died, size) in enumerate(rows):
        alive = np.flatnonzero((lower[:used] < died) & (upper[:used] > born))
        offset = _lowest_gap(start[alive], end[alive], size) if len(alive) else 0
        offsets[block] = offset
        place = int(start[:used].searchsorted(offset))
        placed[:, place + 1 : used + 1] = placed[:, place:used]
        placed[:, place] = offset, offset + size, born, died
    return offsets


def _lowest_gap(start: Column, end: Column, size: int) -> int:
    """The lowest offset with ``size`` free bytes between blocks that are sorted by start."""
    covered = np.maximum.accumulate(end)
    gap = start.copy()
    gap[1:] -= covered[:-1]
    fitting = gap >= size
    first = int(fitting.argmax())
    if not fitting[first]:
        return int(covered[-1])
    return int(covered[first - 1]) if first else 0
