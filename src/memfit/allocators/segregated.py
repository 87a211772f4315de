"""Segregated free lists: one per power of two; the first that fits in the request's own list or above."""

from __future__ import annotations

from memfit.allocators.address_space import Span
from memfit.allocators.free_store import FreeIndex, IndexedAllocator


class SizeClasses(FreeIndex):
    """Stretches by the power of two that they reach; within a list the latest comes first."""

    def __init__(self) -> None:
        self._lists: list[dict[int, int]] = [{} for _ in range(64)]
        self._filled = 0  # bit k: list k has a stretch

    def find(self, size: int) -> Span | None:
        own = size.bit_length() - 1
        for start, length in reversed(self._lists[own].items()):
            if length >= size:
                return start, length
        above = self._filled >> (own + 1)
        if not above:
            return None
        # Every stretch of a higher list is long enough; the lowest filled one has the shortest.
        nearest = own + (above & -above).bit_length()
        return next(reversed(self._lists[nearest].items()))

    def add(self, start: int, size: int) -> None:
        own = size.bit_length() - 1
        self._lists[own][start] = size
        self._filled |= 1 << own

    def remove(self, start: int, size: int) -> None:
        own = size.bit_length() - 1
        del self._lists[own][start]
        if not self._lists[own]:
            self._filled &= ~(1 << own)


class SegregatedFit(IndexedAllocator):
    """Free lists by powers of two."""

    make_index = SizeClasses
