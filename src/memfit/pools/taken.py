"""Which ranges of a stretch of memory are taken."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class TakenRanges:
    """Ranges ``[start, end)`` that do not meet, in order of their starts."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def total_bytes(self) -> int:
        """What all of them hold."""
        return sum(self._ends) - sum(self._starts)

    def take(self, start: int, end: int) -> bool:
        """Note a range as taken; False, and nothing noted, where another one lies in it."""
        index = bisect_right(self._starts, start)
        if index and self._ends[index - 1] > start:
            return False
        if index < len(self._starts) and self._starts[index] < end:
            return False
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        return True

    def give_back(self, start: int) -> bool:
        """The range that starts there is free again; False where none does."""
        index = bisect_left(self._starts, start)
        if index == len(self._starts) or self._starts[index] != start:
            return False
        del self._starts[index], self._ends[index]
        return True

    def gaps(self, end: int) -> list[tuple[int, int]]:
        """The stretches ``(start, end)`` between 0 and ``end`` that no range lies in."""
        starts, ends = [*self._starts, end], [0, *self._ends]
        return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]
