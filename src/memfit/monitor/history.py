"""What was measured over time, in tiers: the last hours sample by sample, weeks in ever longer buckets.

A bucket keeps the least, the most and the last of every figure, so that no tier loses a peak; the last tier
is one bucket over everything. Each tier is a ring of fixed size (`memfit.monitor.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfit.monitor.ring import Floats, RingLayout, RingWriter, Rows, read_ring

_PARTS = ("min", "max", "last")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One ring of a history.

    Args:
        name: of the file.
        bucket_seconds: how much time a row stands for; 0 for one sample, infinity for everything.
        capacity: how many rows are kept.
    """

    name: str
    bucket_seconds: float
    capacity: int


TIERS = (
    Tier(name="samples", bucket_seconds=0, capacity=7200),
    Tier(name="10s", bucket_seconds=10, capacity=8640),
    Tier(name="2min", bucket_seconds=120, capacity=10080),
    Tier(name="whole", bucket_seconds=math.inf, capacity=1),
)
"""At one sample a second: two hours, a day, two weeks, everything. About 10 MB for 20 figures when full."""

STEP_TIERS = (
    Tier(name="steps", bucket_seconds=0, capacity=65536),
    Tier(name="minute", bucket_seconds=60, capacity=10080),
    Tier(name="whole", bucket_seconds=math.inf, capacity=1),
)
"""For training steps: the last 65,536 one by one, a week by the minute, everything."""


class HistoryWriter:
    """Appends to all tiers. Goes on where an earlier process ended, also inside a bucket."""

    def __init__(self, folder: Path, columns: Sequence[str], tiers: Sequence[Tier] = TIERS) -> None:
        self.columns = tuple(columns)
        self._tiers = [_TierWriter(folder, self.columns, tier) for tier in tiers]

    def append(self, time_seconds: float, values: Mapping[str, float | int | None]) -> None:
        """Add one sample; figures that are not given are unknown."""
        row = [values.get(name) for name in self.columns]
        for tier in self._tiers:
            tier.append(time_seconds, row)

    def close(self) -> None:
        """Close the files; everything is in them already."""
        for tier in self._tiers:
            tier.close()


class _TierWriter:
    def __init__(self, folder: Path, columns: tuple[str, ...], tier: Tier) -> None:
        self._tier = tier
        bucketed = tier.bucket_seconds > 0
        names = tuple(f"{name}.{part}" for part in _PARTS for name in columns) if bucketed else columns
        path = folder / f"{tier.name}.ring"
        self._ring = RingWriter(path, RingLayout(columns=names, capacity=tier.capacity))
        self._open: tuple[float, list[float | None]] | None = None
        if bucketed and self._ring.number:
            self._open = _newest(path)

    def append(self, time_seconds: float, row: Sequence[float | int | None]) -> None:
        width = self._tier.bucket_seconds
        if width <= 0:
            self._ring.append(time_seconds, row)
            return
        start = 0.0 if math.isinf(width) else time_seconds // width * width
        if self._open is not None and self._open[0] == start:
            values = _joined(self._open[1], row)
            self._ring.put(start, values)
        else:
            values = [*row, *row, *row]
            self._ring.append(start, values)
        self._open = start, values

    def close(self) -> None:
        self._ring.close()


def _newest(path: Path) -> tuple[float, list[float | None]] | None:
    rows = read_ring(path)
    if not len(rows):
        return None
    values = [float(column[-1]) for column in rows.values.values()]
    return float(rows.time_seconds[-1]), [None if math.isnan(value) else value for value in values]


def _joined(bucket: Sequence[float | None], row: Sequence[float | None]) -> list[float | None]:
    """A bucket with one more sample; what the sample does not know stays as it was."""
    width = len(row)
    low, high, last = bucket[:width], bucket[width : 2 * width], bucket[2 * width :]
    pairs = list(zip(low, high, last, row, strict=True))
    return [
        *(_or(min, a, new) for a, _, _, new in pairs),
        *(_or(max, b, new) for _, b, _, new in pairs),
        *(c if new is None else new for _, _, c, new in pairs),
    ]


def _or(choose: object, old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return new if old is None else old
    return min(old, new) if choose is min else max(old, new)


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """One or more figures over time, at no more than a given number of points.

    Args:
        time_seconds: the beginning of each point's stretch, rising.
        low, high, last: per figure, the least, the most and the last in each stretch; NaN where unknown.
    """

    time_seconds: Floats
    low: Mapping[str, Floats]
    high: Mapping[str, Floats]
    last: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.time_seconds)


class History:
    """Reads what a `HistoryWriter` wrote or is still writing."""

    def __init__(self, folder: Path, tiers: Sequence[Tier] = TIERS) -> None:
        self.folder = folder
        self._tiers = tuple(tiers)

    def __bool__(self) -> bool:
        return (self.folder / f"{self._tiers[0].name}.ring").is_file()

    def samples(self, *, after: int = 0) -> Rows:
        """The newest tier, sample by sample, from row number ``after`` on."""
        return read_ring(self.folder / f"{self._tiers[0].name}.ring", after=after)

    def whole(self) -> dict[str, float]:
        """The most that each figure ever was."""
        parts = _split(read_ring(self.folder / f"{self._tiers[-1].name}.ring"), bucketed=True)
        return {name: float(values[-1]) for name, values in parts.high.items() if len(values)}

    def series(
        self, *, begin_seconds: float = -math.inf, end_seconds: float = math.inf, points: int = 1000
    ) -> Series:
        """Everything from ``begin_seconds`` to ``end_seconds``, each from the finest tier that has it."""
        joined: Series | None = None
        for tier in self._tiers:
            if math.isinf(tier.bucket_seconds):
                continue
            rows = read_ring(self.folder / f"{tier.name}.ring")
            part = _split(rows, bucketed=tier.bucket_seconds > 0)
            joined = part if joined is None else _older_first(part, joined)
            if len(rows) and rows.number[0] == 1:
                break  # it has lost nothing, so that coarser tiers have nothing more
        assert joined is not None, "a history has a tier that is not the whole"
        times = joined.time_seconds
        inside = slice(*np.searchsorted(times, [begin_seconds, end_seconds], side="left").tolist())
        return thin(_take(joined, inside), points)


def _split(rows: Rows, *, bucketed: bool) -> Series:
    if not bucketed:
        return Series(time_seconds=rows.time_seconds, low=rows.values, high=rows.values, last=rows.values)
    parts = {
        part: {
            name.removesuffix(f".{part}"): values
            for name, values in rows.values.items()
            if name.endswith(f".{part}")
        }
        for part in _PARTS
    }
    return Series(time_seconds=rows.time_seconds, low=parts["min"], high=parts["max"], last=parts["last"])


def _older_first(coarse: Series, fine: Series) -> Series:
    """``fine``, and before it the buckets of ``coarse`` that began before it begins."""
    if not len(fine):
        return coarse
    # The bucket in which the fine tier begins is kept: it has samples that the fine tier lost.
    older = _take(
        coarse, slice(0, int(np.searchsorted(coarse.time_seconds, fine.time_seconds[0], side="left")))
    )
    parts = (
        {name: np.concatenate([getattr(older, part)[name], getattr(fine, part)[name]]) for name in fine.last}
        for part in ("low", "high", "last")
    )
    low, high, last = parts
    times = np.concatenate([older.time_seconds, fine.time_seconds])
    return Series(time_seconds=times, low=low, high=high, last=last)


def _take(series: Series, part: slice) -> Series:
    low, high, last = (
        {name: values[part] for name, values in getattr(series, which).items()}
        for which in ("low", "high", "last")
    )
    return Series(time_seconds=series.time_seconds[part], low=low, high=high, last=last)


def thin(series: Series, points: int) -> Series:
    """No more than ``points`` stretches of equally many samples; each keeps its least, most and last."""
    count = len(series)
    if count <= points:
        return series
    starts = np.linspace(0, count, max(1, points), endpoint=False).astype(np.int64)
    ends = np.append(starts[1:], count) - 1
    return Series(
        time_seconds=series.time_seconds[starts],
        low={name: _reduce(np.fmin, values, starts) for name, values in series.low.items()},
        high={name: _reduce(np.fmax, values, starts) for name, values in series.high.items()},
        last={name: values[ends] for name, values in series.last.items()},
    )


def _reduce(ufunc: np.ufunc, values: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    reduced: Floats = ufunc.reduceat(values, starts)
    return reduced
