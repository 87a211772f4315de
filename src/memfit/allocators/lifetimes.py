"""When each block of a program lives, and how large it is: what offline packing starts from."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.core.errors import InputError, UsageError
from memfit.core.trace import NO_BLOCK, Action, Trace

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Blocks as three columns of equal length; a block is live from ``lower`` until before ``upper``.

    Attributes:
        lower, upper: moments, in any unit; ``lower < upper``.
        size_bytes: at least 1 each.
    """

    lower: Column
    upper: Column
    size_bytes: Column

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "size_bytes"):
            column = np.array(getattr(self, name), dtype=np.int64)
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        if not self.lower.shape == self.upper.shape == self.size_bytes.shape == (len(self.lower),):
            raise UsageError("lifetimes: lower, upper and size_bytes must be columns of one length")
        for rule, broken in (
            ("it must begin before it ends", self.lower >= self.upper),
            ("its size must be at least 1", self.size_bytes < 1),
        ):
            if broken.any():
                row = int(broken.argmax())
                values = int(self.lower[row]), int(self.upper[row]), int(self.size_bytes[row])
                raise UsageError(f"lifetimes: block {row} (lower, upper, size) = {values}: {rule}")

    @staticmethod
    def of(rows: Iterable[tuple[int, int, int]]) -> Lifetimes:
        """From rows ``(lower, upper, size_bytes)``."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 3)
        return Lifetimes(table[:, 0], table[:, 1], table[:, 2])

    def __len__(self) -> int:
        return len(self.lower)

    def rows(self, chosen: npt.NDArray[np.int64]) -> Lifetimes:
        """The blocks at these indices."""
        return Lifetimes(self.lower[chosen], self.upper[chosen], self.size_bytes[chosen])

    def rounded_to(self, alignment_bytes: int) -> Lifetimes:
        """Every size rounded up to a multiple."""
        if alignment_bytes == 1:
            return self
        sizes = -(-self.size_bytes // alignment_bytes) * alignment_bytes
        return Lifetimes(self.lower, self.upper, sizes)

    @cached_property
    def moments(self) -> Column:
        """Every moment at which a block begins or ends, in order, each once."""
        return np.unique(np.concatenate((self.lower, self.upper)))

    @cached_property
    def load_bytes(self) -> Column:
        """The bytes that are live from each of the `moments` until the next; 0 from the last."""
        change = np.zeros(len(self.moments), dtype=np.int64)
        np.add.at(change, np.searchsorted(self.moments, self.lower), self.size_bytes)
        np.subtract.at(change, np.searchsorted(self.moments, self.upper), self.size_bytes)
        return change.cumsum()

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes that are live at one moment."""
        return int(self.load_bytes.max(initial=0))

    @cached_property
    def fullest_load_bytes(self) -> Column:
        """For each block the most bytes that are live at a moment of its life."""
        if not len(self):
            return self.size_bytes
        spans = np.searchsorted(self.moments, np.stack((self.lower, self.upper), axis=1))
        # reduceat takes the maximum between neighbours of a list of borders; every other one is a life.
        return np.maximum.reduceat(self.load_bytes, spans.ravel())[::2]

    def height_bytes(self, offsets: Column) -> int:
        """The highest end of a block that lies at these offsets."""
        return int((offsets + self.size_bytes).max()) if len(self) else 0

    def independent_parts(self) -> list[Column]:
        """Indices of groups of blocks that never live at the same time as a block of another group."""
        order = np.lexsort((np.arange(len(self)), self.lower))
        ends = np.maximum.accumulate(self.upper[order])
        starts = np.flatnonzero(self.lower[order][1:] >= ends[:-1]) + 1
        return [np.sort(part) for part in np.split(order, starts)] if len(self) else []


def lifetimes_of(trace: Trace) -> Lifetimes:
    """The blocks of a trace, in the order of their allocation; the moments are indices of its events.

    Blocks that were there before the trace and are freed in it follow after all others and begin at -1; what
    is never freed ends with the trace. Empty blocks (0 bytes) have no row.
    """
    count = len(trace)
    allocs = np.flatnonzero((trace.action == Action.ALLOC) & (trace.size_bytes > 0))
    frees = np.flatnonzero(trace.action == Action.FREE)
    born = trace.alloc_index()[frees]
    upper = np.full(count, count, dtype=np.int64)
    upper[born[born >= 0]] = frees[born >= 0]
    earlier = frees[(trace.block[frees] == NO_BLOCK) & (trace.size_bytes[frees] > 0)]
    return Lifetimes(
        np.concatenate((allocs, np.full(len(earlier), -1))),
        np.concatenate((upper[allocs], earlier)),
        np.concatenate((trace.size_bytes[allocs], trace.size_bytes[earlier])),
    )


def read_lifetimes(path: str | os.PathLike[str]) -> Lifetimes:
    """Read a problem as minimalloc writes it: CSV with the columns ``lower``, ``upper`` and ``size``.

    Raises:
        InputError: not such a file; the message names the line.
    """
    name = os.fspath(path)
    rows: list[tuple[int, int, int]] = []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                rows.append((int(row["lower"]), int(row["upper"]), int(row["size"])))
        return Lifetimes.of(rows)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {name}: {error}") from error
    except (KeyError, ValueError, TypeError, csv.Error, UsageError) as error:
        what = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{name}: not a packing problem near line {len(rows) + 2}: {what}") from error
