"""Offline packing: from known lifetimes to offsets, at or near the most bytes that are ever live at once.

A repeated training step allocates the same blocks at the same moments each time, so their offsets can be
chosen in advance, all together. `pack` finds them; ``validate.packing_problem`` checks any answer naively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.allocators import packing_heuristics, packing_search
from memfit.allocators.lifetimes import Lifetimes
from memfit.core.errors import UsageError

DEFAULT_EFFORT = 200_000
"""Nodes that a search may visit: about ten seconds."""

LARGEST_SEARCHED_PROBLEM = 1_500
"""Blocks beyond which only the heuristics run: the search keeps tables of blocks by blocks."""

_STEPS_OF_BISECTION = 5


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each block of a problem goes.

    Attributes:
        offsets: first byte of each block, in the order of the problem's rows.
        height_bytes: memory that is needed: the highest end of a block.
        peak_live_bytes: the most bytes live at once, sizes rounded up to the alignment; no packing is lower.
        lower_bound_bytes: a height that no packing is below; more than the peak where a search has shown so.
        method: what found it, for people.
    """

    offsets: npt.NDArray[np.int64]
    height_bytes: int
    peak_live_bytes: int
    lower_bound_bytes: int
    method: str

    @property
    def optimal(self) -> bool:
        """Whether it is known that no packing needs less."""
        return self.height_bytes == self.lower_bound_bytes

    @property
    def excess(self) -> float:
        """Height over the peak of live bytes, minus one: 0.01 is one percent."""
        return self.height_bytes / self.peak_live_bytes - 1 if self.peak_live_bytes else 0.0


def pack(
    lifetimes: Lifetimes,
    *,
    capacity_bytes: int | None = None,
    alignment_bytes: int = 1,
    effort: int = DEFAULT_EFFORT,
) -> Packing:
    """Choose an offset for every block so that blocks that live at the same time do not overlap.

    The same input gives the same packing, on any machine: effort is counted in nodes, not in seconds.

    Args:
        lifetimes: the blocks.
        capacity_bytes: be content with a packing of this height. The answer may still be higher: see
            ``height_bytes``. Without it, the least height that is found.
        alignment_bytes: sizes are rounded up to multiples of it; all offsets are multiples.
        effort: nodes of the search, which runs where the heuristics do not reach the bound or the capacity.

    Examples:
        >>> blocks = Lifetimes.of([(0, 2, 4), (1, 3, 4), (2, 4, 4)])
        >>> packing = pack(blocks)
        >>> packing.height_bytes, packing.offsets.tolist()
        (8, [0, 4, 0])

    Raises:
        UsageError: an alignment below 1.
    """
    if alignment_bytes < 1:
        raise UsageError(f"alignment_bytes={alignment_bytes}: it must be at least 1")
    rounded = lifetimes.rounded_to(alignment_bytes)
    peak = rounded.peak_live_bytes
    goal = max(peak, capacity_bytes or 0)
    offsets, order = packing_heuristics.best_first_fit(rounded, goal)
    height = rounded.height_bytes(offsets)
    found = _Found(offsets, height, peak, f"first fit by {order}")
    if height > goal and len(rounded) <= LARGEST_SEARCHED_PROBLEM:
        found = _search_down(rounded, found, goal, effort)
    return Packing(
        offsets=found.offsets,
        height_bytes=found.height,
        peak_live_bytes=peak,
        lower_bound_bytes=min(found.bound, found.height),
        method=found.method,
    )


@dataclass(frozen=True)
class _Found:
    offsets: npt.NDArray[np.int64]
    height: int
    bound: int
    method: str


def _search_down(lifetimes: Lifetimes, found: _Found, goal: int, effort: int) -> _Found:
    """Search at the goal; where that gives up, bisect between what is known to fail and what is found."""
    unit = int(np.gcd.reduce(lifetimes.size_bytes))
    tried = failed = goal
    for step in range(_STEPS_OF_BISECTION):
        share = effort if step == 0 else effort // _STEPS_OF_BISECTION
        outcome = packing_search.search(lifetimes, capacity_bytes=tried, node_limit=share)
        if outcome.offsets is not None:
            height = lifetimes.height_bytes(outcome.offsets)
            found = _Found(outcome.offsets, height, found.bound, f"search ({outcome.nodes} nodes)")
        else:
            failed = tried
            bound = max(found.bound, tried // unit * unit + unit) if outcome.proven else found.bound
            found = _Found(found.offsets, found.height, bound, found.method)
        tried = (failed + found.height) // 2 // unit * unit
        if found.height <= goal or not failed < tried < found.height:
            break
    return found


def offsets_in_allocation_order(lifetimes: Lifetimes, packing: Packing) -> Sequence[int]:
    """The packing's offsets as a program that repeats the recorded step meets them: by time of birth."""
    order = np.lexsort((np.arange(len(lifetimes)), lifetimes.lower))
    return [int(offset) for offset in packing.offsets[order]]
