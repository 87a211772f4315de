"""Growth from step to step: a slope that outliers do not move, and the blocks that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis.blocks import Blocks, Indices, Mask

MOST_POINTS = 300
WARM_UP_STEPS = 2
"""The optimizer's state and the libraries' workspaces appear in the first steps."""
OWNED = ("parameter", "gradient", "optimizer_state", "buffer", "workspace")


@dataclass(frozen=True, kw_only=True)
class Slope:
    """A line through points.

    Attributes:
        per_step: the median of the slopes between all pairs of points (Theil 1950, Sen 1968).
        r_squared: the share of the points' variance that the line explains.
        steps: how many steps the points span.
    """

    per_step: float
    r_squared: float
    steps: int


def slope_of(values: Sequence[int] | npt.NDArray[np.int64]) -> Slope:
    """The slope of values that are one step apart.

    Examples:
        >>> slope_of([10, 20, 30, 900, 50]).per_step
        10.0
    """
    points = np.asarray(values, dtype=np.float64)
    at = np.arange(len(points), dtype=np.float64)
    if len(points) > MOST_POINTS:
        chosen = np.linspace(0, len(points) - 1, MOST_POINTS).astype(np.int64)
        at, points = at[chosen], points[chosen]
    if len(points) < 2:
        return Slope(per_step=0.0, r_squared=0.0, steps=0)
    first, second = np.triu_indices(len(points), 1)
    slope = float(np.median((points[second] - points[first]) / (at[second] - at[first])))
    rest = points - slope * at
    rest -= np.median(rest)
    variance = float(((points - points.mean()) ** 2).sum())
    explained = 1.0 - float((rest**2).sum()) / variance if variance else 0.0
    return Slope(per_step=slope, r_squared=max(explained, 0.0), steps=len(values) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Growth:
    """What piles up from step to step.

    Attributes:
        slope: of the live bytes at the ends of steps, after the warm-up.
        live_bytes: these bytes.
        mask: the blocks that outlive the step after their own, of sites where most do.
        step_of: the step in which each block is born.
    """

    slope: Slope
    live_bytes: Indices
    mask: Mask
    step_of: Indices


def growth_of(blocks: Blocks, live_bytes: npt.NDArray[np.int64], ends: Sequence[int]) -> Growth | None:
    """The growth of a trace over its steps; ``None`` where there are too few to tell.

    Args:
        blocks: the blocks of the trace.
        live_bytes: after each event.
        ends: the first event after each step.
    """
    kept = list(ends)[WARM_UP_STEPS:]
    if len(kept) < 2:
        return None
    at_ends = live_bytes[np.array(kept, dtype=np.int64) - 1]
    step_of = np.searchsorted(np.array(ends), blocks.born, side="right")
    return Growth(
        slope=slope_of(at_ends),
        live_bytes=at_ends,
        mask=_piling_up(blocks, np.array(ends), step_of),
        step_of=step_of,
    )


def _piling_up(blocks: Blocks, ends: Indices, step_of: Indices) -> Mask:
    """Blocks that live through a whole step after their own, at sites where most do, in most steps."""
    last = len(ends) - 1
    next_end = ends[np.minimum(step_of + 1, last)]
    judged = (step_of >= 1) & (step_of < last)  # the warm-up's stay, the last step's cannot be judged
    outlives = judged & (blocks.freed > next_end) & ~blocks.has("category", OWNED)
    sites = blocks.site_codes
    if not len(sites) or not outlives.any():
        return np.zeros(len(blocks), dtype=np.bool_)
    count = int(sites.max()) + 1
    survivors = np.bincount(sites[outlives], minlength=count)
    pairs = np.unique(np.stack([sites[outlives], step_of[outlives]]), axis=1)
    in_steps = np.bincount(pairs[0], minlength=count)
    growing = (survivors >= 3) & (in_steps >= max(3, (last - 1) // 2))
    at_the_end = (step_of >= last) & (blocks.freed >= len(blocks.trace)) & ~blocks.has("category", OWNED)
    mask: Mask = growing[sites] & (outlives | at_the_end)
    return mask


def sites_of(blocks: Blocks, mask: Mask, most: int = 3) -> list[dict[str, Any]]:
    """The sites of the masked blocks with the most bytes, as plain values."""
    return [
        {"where": site, "bytes": total, "blocks": count}
        for site, total, count in blocks.largest_sites(mask, most)
    ]
