"""Free stretches of an address space, found by size or by address; for policies that change their mind."""

# ruff: noqa: PLR1730  -- max() costs three times the comparison, and every allocation comes by here

from __future__ import annotations

from bisect import bisect_left, insort


class Gaps:
    """Free stretches below a top that rises when nothing fits and falls when what lies under it is free.

    Best fit is a binary search; the lowest fit looks at stretches in address order.
    """

    __slots__ = ("_by_size", "_ends", "_starts", "peak_bytes", "top_bytes", "total_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.top_bytes = 0
        self.peak_bytes = 0
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def copy(self) -> Gaps:
        """The same, to try things on; its peak begins at its top."""
        twin = Gaps(self.total_bytes)
        twin.top_bytes = twin.peak_bytes = self.top_bytes
        twin._starts = self._starts.copy()
        twin._ends = self._ends.copy()
        twin._by_size = self._by_size.copy()
        return twin

    def best(self, size_bytes: int) -> int | None:
        """Start of the smallest gap that fits, the lowest among equals."""
        index = bisect_left(self._by_size, (size_bytes, -1))
        return self._by_size[index][1] if index < len(self._by_size) else None

    def highest_best(self, size_bytes: int) -> int | None:
        """Start of the smallest gap that fits, the highest among equals."""
        index = bisect_left(self._by_size, (size_bytes, -1))
        if index == len(self._by_size):
            return None
        size = self._by_size[index][0]
        return self._by_size[bisect_left(self._by_size, (size + 1, -1)) - 1][1]

    def lowest(self, size_bytes: int) -> int | None:
        """Start of the lowest gap that fits."""
        ends = self._ends
        for start in self._starts:
            if ends[start] - start >= size_bytes:
                return start
        return None

    def take(self, gap: int, size_bytes: int, *, from_end: bool = False) -> int:
        """Take a piece of a gap, from its start or its end; where the piece starts."""
        end = self._ends[gap]
        self._drop(gap)
        start = end - size_bytes if from_end else gap
        if start > gap:
            self._add(gap, start)
        if start + size_bytes < end:
            self._add(start + size_bytes, end)
        return start

    def extend(self, size_bytes: int) -> int | None:
        """Take a piece at the top; None where the space ends."""
        start = self.top_bytes
        if start + size_bytes > self.total_bytes:
            return None
        self.top_bytes = start + size_bytes
        if self.top_bytes > self.peak_bytes:
            self.peak_bytes = self.top_bytes
        return start

    def give_back(self, start: int, size_bytes: int) -> None:
        """A piece is free; it joins its neighbours."""
        end = start + size_bytes
        index = bisect_left(self._starts, start)
        if index and self._ends[self._starts[index - 1]] == start:
            start = self._starts[index - 1]
            self._drop(start)
        if end in self._ends:
            beyond = self._ends[end]
            self._drop(end)
            end = beyond
        if end == self.top_bytes:
            self.top_bytes = start
        else:
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (end - start, start))
        self._ends[start] = end

    def _drop(self, start: int) -> None:
        end = self._ends.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
