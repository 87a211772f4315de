"""Indexed fit: best fit through a balanced tree of the free stretches, in logarithmic time.

The tree is a treap (Seidel and Aragon, 1996): ordered by (size, start), and a heap by a number made from the
start, which keeps it about ``2 ln n`` deep whatever is allocated. The numbers are not random, so a run can be
repeated.
"""

from __future__ import annotations

from memfit.allocators.address_space import Span
from memfit.allocators.free_store import FreeIndex, IndexedAllocator

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class _Node:
    __slots__ = ("key", "left", "priority", "right")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        mixed = key[1] * _MIX & _MASK
        self.priority = (mixed ^ mixed >> 29) * _MIX & _MASK
        self.left: _Node | None = None
        self.right: _Node | None = None


class TreeIndex(FreeIndex):
    """Stretches in a treap by (size, start)."""

    def __init__(self) -> None:
        self._root: _Node | None = None

    def find(self, size: int) -> Span | None:
        node, found = self._root, None
        while node is not None:
            if node.key[0] >= size:
                node, found = node.left, node
            else:
                node = node.right
        return None if found is None else (found.key[1], found.key[0])

    def add(self, start: int, size: int) -> None:
        new = _Node((size, start))
        parent, node = None, self._root
        while node is not None and node.priority >= new.priority:
            parent, node = node, node.left if new.key < node.key else node.right
        new.left, new.right = _split(node, new.key)
        self._hang(parent, new.key, new)

    def remove(self, start: int, size: int) -> None:
        key = (size, start)
        parent, node = None, self._root
        while node is not None and node.key != key:
            parent, node = node, node.left if key < node.key else node.right
        assert node is not None, "a stretch that is removed is in the index"
        self._hang(parent, key, _merge(node.left, node.right))

    def _hang(self, parent: _Node | None, key: tuple[int, int], node: _Node | None) -> None:
        if parent is None:
            self._root = node
        elif key < parent.key:
            parent.left = node
        else:
            parent.right = node


def _split(node: _Node | None, key: tuple[int, int]) -> tuple[_Node | None, _Node | None]:
    """What is below the key and what is above it, as two trees."""
    if node is None:
        return None, None
    if node.key < key:
        node.right, above = _split(node.right, key)
        return node, above
    below, node.left = _split(node.left, key)
    return below, node


def _merge(low: _Node | None, high: _Node | None) -> _Node | None:
    """One tree of two; all keys of the first are below all of the second."""
    if low is None or high is None:
        return low or high
    if low.priority >= high.priority:
        low.right = _merge(low.right, high)
        return low
    high.left = _merge(low, high.left)
    return high


class IndexedFit(IndexedAllocator):
    """Best fit through a balanced tree; places blocks exactly as `BestFit` does."""

    make_index = TreeIndex
