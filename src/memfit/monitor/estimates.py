"""Growth, fitted so that outliers and jumps do not pass for it; and when memory will be full at that rate.

The slope is Theil and Sen's: the median of the slopes of all pairs of points, which up to 29 % of outliers do
not move. Whether there is a trend at all is decided by Mann and Kendall's test over the whole window and over
its later half, so that a single jump (the optimizer's state in step 1, a cache that fills) is no growth.

Sources: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968); M. G.
Kendall, "Rank Correlation Methods" (1975).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FEWEST_POINTS = 12
MOST_POINTS = 64
"""More points are put into so many runs, of each the lowest: what is held when everything else is free."""
WHOLE_SIGNIFICANCE = 3.0
HALF_SIGNIFICANCE = 2.0
"""How many standard deviations the trend must be above none, in the whole window and in its later half."""
LEAST_LATER_SHARE = 0.3
"""The least that the slope of the later half may be of the whole's: what slows down is a cache that fills."""
SMALLEST_GROWTH_BYTES = 1 << 20
SMALLEST_GROWTH_SHARE = 0.001

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How memory grows.

    Args:
        bytes_per_unit: per step or per second, as the points were given; 0 where no trend is certain.
        over_bytes: what that comes to over the points looked at.
        points: how many there were.
    """

    bytes_per_unit: float
    over_bytes: float
    points: int


def growth(positions: Sequence[float], held_bytes: Sequence[float]) -> Growth | None:
    """The growth of ``held_bytes`` over ``positions`` (steps or seconds); None for too few points.

    Examples:
        >>> growth(range(20), [1e9 + 4e6 * step for step in range(20)]).bytes_per_unit
        4000000.0
        >>> growth(range(20), [1e9] * 10 + [2e9] * 10).bytes_per_unit
        0.0
    """
    x, y = np.asarray(positions, dtype=np.float64), np.asarray(held_bytes, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = _lowest_of_runs(x[known], y[known])
    if len(x) < FEWEST_POINTS or x[-1] <= x[0]:
        return None
    slope = _theil_sen(x, y)
    over = slope * float(x[-1] - x[0])
    half = len(x) // 2
    certain = _kendall(y) > WHOLE_SIGNIFICANCE and _kendall(y[half:]) > HALF_SIGNIFICANCE
    certain = certain and _theil_sen(x[half:], y[half:]) > LEAST_LATER_SHARE * slope
    enough = over > max(SMALLEST_GROWTH_BYTES, SMALLEST_GROWTH_SHARE * float(np.median(y)))
    if not (certain and enough):
        return Growth(bytes_per_unit=0.0, over_bytes=0.0, points=len(x))
    return Growth(bytes_per_unit=slope, over_bytes=over, points=len(x))


def seconds_to_oom(room_bytes: float | None, bytes_per_second: float | None) -> float | None:
    """When the room is gone; infinity where nothing grows, None where either is unknown."""
    if room_bytes is None or bytes_per_second is None:
        return None
    return max(0.0, room_bytes) / bytes_per_second if bytes_per_second > 0 else math.inf


def imbalance(values: Sequence[float]) -> float | None:
    """(largest - median) / median of what the ranks hold; None for fewer than two ranks."""
    if len(values) < 2:
        return None
    middle = float(np.median(values))
    return (max(values) - middle) / middle if middle > 0 else 0.0


def _lowest_of_runs(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.linspace(0, len(x), MOST_POINTS, endpoint=False).astype(np.int64)
    ends = np.append(starts[1:], len(x))
    lowest = np.array([begin + int(np.argmin(y[begin:end])) for begin, end in zip(starts, ends, strict=True)])
    return x[lowest], y[lowest]


def _theil_sen(x: Floats, y: Floats) -> float:
    first, second = np.triu_indices(len(x), k=1)
    apart = x[second] - x[first]
    rising = apart > 0
    return float(np.median((y[second] - y[first])[rising] / apart[rising]))


def _kendall(y: Floats) -> float:
    """Mann and Kendall's statistic in standard deviations, not corrected for ties (the safe side)."""
    count = len(y)
    if count < 4:
        return 0.0
    first, second = np.triu_indices(count, k=1)
    score = float(np.sign(y[second] - y[first]).sum())
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (score - math.copysign(1, score)) / deviation if score else 0.0
