"""The free stretches of a range, joined with their neighbours, and an index that finds one by size.

Neighbours are found through the borders of the stretches (boundary tags): constant time. Which stretch a
request gets, and at what cost, is the index's choice; so a policy here *is* an index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from memfit.allocators.address_space import AddressSpaceAllocator, SpaceConfig, Span


class FreeIndex(ABC):
    """Free stretches, found by size."""

    @abstractmethod
    def find(self, size: int) -> Span | None:
        """A stretch of at least ``size`` bytes, by the policy's preference, or None."""

    @abstractmethod
    def add(self, start: int, size: int) -> None:
        """Note a free stretch."""

    @abstractmethod
    def remove(self, start: int, size: int) -> None:
        """Forget a stretch that is in the index."""

    def replace(self, old: Span, new: Span) -> None:
        """A stretch in the index has become longer or shorter, with none between its old and new place."""
        self.remove(*old)
        self.add(*new)


class FreeStore:
    """Free stretches of a range, none of which touch."""

    def __init__(self, index: FreeIndex, total_bytes: int) -> None:
        self._index = index
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._note(0, total_bytes)
        index.add(0, total_bytes)

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes that are no longer free, or None where no stretch is long enough."""
        found = self._index.find(size)
        if found is None:
            return None
        start, length = found
        del self._size_at[start], self._start_before[start + length]
        if length == size:
            self._index.remove(start, length)
        else:
            self._note(start + size, length - size)
            self._index.replace(found, (start + size, length - size))
        return start

    def give_back(self, start: int, size: int) -> None:
        """Free a stretch, and join it with what is free beside it."""
        left = self._start_before.pop(start, None)
        right_size = self._size_at.pop(start + size, 0)
        right = (start + size, right_size)
        end = start + size + right_size
        if right_size:
            del self._start_before[end]
        first = start if left is None else left
        if left is not None:
            if right_size:
                self._index.remove(*right)
            self._index.replace((left, start - left), (left, end - left))
        elif right_size:
            self._index.replace(right, (start, end - start))
        else:
            self._index.add(start, size)
        self._note(first, end - first)

    def spans(self) -> list[Span]:
        """All free stretches in address order."""
        return sorted(self._size_at.items())

    def _note(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start


class IndexedAllocator(AddressSpaceAllocator):
    """A policy that splits the free stretch its index finds, and joins free neighbours at once."""

    make_index: ClassVar[Callable[[], FreeIndex]]

    def __init__(self, config: SpaceConfig | None = None) -> None:
        super().__init__(config)
        self._store = FreeStore(type(self).make_index(), self.total_bytes)

    def _take(self, size_bytes: int) -> Span | None:
        start = self._store.take(size_bytes)
        return None if start is None else (start, size_bytes)

    def _give_back(self, start: int, size_bytes: int) -> None:
        self._store.give_back(start, size_bytes)

    def free_spans(self) -> list[Span]:
        return self._store.spans()
