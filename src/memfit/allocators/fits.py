"""First, best, worst and next fit: one list of free stretches in address order, four ways to choose."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

from memfit.allocators.address_space import Span
from memfit.allocators.free_store import FreeIndex, IndexedAllocator

Choose: TypeAlias = Callable[[list[int], int, int], int]
"""From the sizes of the stretches, the size asked for and where the last search ended: an index, or -1."""


def first(sizes: list[int], size: int, after: int) -> int:
    """The lowest stretch that is long enough."""
    for index, length in enumerate(sizes):
        if length >= size:
            return index
    return -1


def next_after(sizes: list[int], size: int, after: int) -> int:
    """The first that is long enough from where the last search ended, around the end if need be."""
    for index in range(after, len(sizes)):
        if sizes[index] >= size:
            return index
    return first(sizes[:after], size, after)


def best(sizes: list[int], size: int, after: int) -> int:
    """The shortest that is long enough; of equals the lowest."""
    shortest = min((length for length in sizes if length >= size), default=-1)
    return -1 if shortest < 0 else sizes.index(shortest)


def worst(sizes: list[int], size: int, after: int) -> int:
    """The longest; of equals the lowest."""
    longest = max(sizes, default=-1)
    return sizes.index(longest) if longest >= size else -1


class AddressIndex(FreeIndex):
    """Stretches in address order. A search looks at them one by one; a change is a binary search."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._cursor = 0  # the address where the last search ended

    def find(self, size: int) -> Span | None:
        after = bisect_left(self._starts, self._cursor)
        index = self._choose(self._sizes, size, after)
        if index < 0:
            return None
        start = self._starts[index]
        self._cursor = start + size
        return start, self._sizes[index]

    def add(self, start: int, size: int) -> None:
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._sizes.insert(index, size)

    def remove(self, start: int, size: int) -> None:
        index = bisect_left(self._starts, start)
        del self._starts[index], self._sizes[index]

    def replace(self, old: Span, new: Span) -> None:
        index = bisect_left(self._starts, old[0])
        self._starts[index], self._sizes[index] = new


class FirstFit(IndexedAllocator):
    """The lowest free stretch that is long enough."""

    make_index = staticmethod(lambda: AddressIndex(first))


class NextFit(IndexedAllocator):
    """The first long enough after the last allocation, around the end if need be."""

    make_index = staticmethod(lambda: AddressIndex(next_after))


class BestFit(IndexedAllocator):
    """The shortest free stretch that is long enough."""

    make_index = staticmethod(lambda: AddressIndex(best))


class WorstFit(IndexedAllocator):
    """The longest free stretch."""

    make_index = staticmethod(lambda: AddressIndex(worst))
