"""Worst fit through a Fibonacci heap of the free stretches (Fredman and Tarjan, 1987).

The longest stretch is at hand in constant time. A stretch that grows, because a neighbour was freed, only
moves up: constant amortised time, which is what this heap is known for. Taking one out is logarithmic,
amortised.
"""

from __future__ import annotations

from memfit.allocators.address_space import Span
from memfit.allocators.free_store import FreeIndex, IndexedAllocator

_FIRST = (-(1 << 63), 0)
"""A key before all others: what is to be removed takes it and is then the minimum."""


class HeapNode:
    """A key in a heap. Siblings form a ring through ``left`` and ``right``."""

    __slots__ = ("child", "degree", "key", "left", "marked", "parent", "right")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.degree = 0
        self.marked = False  # it has lost a child since it became one itself
        self.parent: HeapNode | None = None
        self.child: HeapNode | None = None
        self.left = self.right = self

    def ring(self) -> list[HeapNode]:
        """The node and its siblings."""
        nodes, node = [self], self.right
        while node is not self:
            nodes.append(node)
            node = node.right
        return nodes

    def join(self, other: HeapNode) -> None:
        """Put ``other``, alone in its ring, beside this one."""
        other.left, other.right = self, self.right
        self.right.left = other
        self.right = other

    def leave(self) -> None:
        """Out of the ring; alone again."""
        self.left.right, self.right.left = self.right, self.left
        self.left = self.right = self


class FibonacciHeap:
    """A heap with the least key on top."""

    def __init__(self) -> None:
        self.least: HeapNode | None = None

    def push(self, key: tuple[int, int]) -> HeapNode:
        """Add a key; constant time."""
        node = HeapNode(key)
        self._add_root(node)
        return node

    def decrease(self, node: HeapNode, key: tuple[int, int]) -> None:
        """Give a node a key that is not above its own; constant time, amortised."""
        assert key <= node.key, "a key can only decrease"
        node.key = key
        parent = node.parent
        if parent is not None and key < parent.key:
            self._cut(node, parent)
            while (above := parent.parent) is not None:
                if not parent.marked:
                    parent.marked = True
                    break
                self._cut(parent, above)
                parent = above
        assert self.least is not None
        if key < self.least.key:
            self.least = node

    def remove(self, node: HeapNode) -> None:
        """Take a node out; logarithmic time, amortised."""
        self.decrease(node, _FIRST)
        self.least = node
        self.pop()

    def pop(self) -> None:
        """Take the least node out."""
        node = self.least
        if node is None:
            return
        if node.child is not None:
            for child in node.child.ring():
                child.leave()
                child.parent, child.marked = None, False
                node.join(child)
        rest = None if node.right is node else node.right
        node.leave()
        self.least = None
        if rest is not None:
            self._consolidate(rest)

    def _add_root(self, node: HeapNode) -> None:
        if self.least is None:
            self.least = node
        else:
            self.least.join(node)
            if node.key < self.least.key:
                self.least = node

    def _cut(self, node: HeapNode, parent: HeapNode) -> None:
        parent.child = None if node.right is node else node.right
        parent.degree -= 1
        node.leave()
        node.parent, node.marked = None, False
        self._add_root(node)

    def _consolidate(self, some_root: HeapNode) -> None:
        """Hang roots of equal degree under each other, until all degrees differ."""
        by_degree: dict[int, HeapNode] = {}
        for node in some_root.ring():
            node.leave()
            while (other := by_degree.pop(node.degree, None)) is not None:
                upper, lower = (node, other) if node.key < other.key else (other, node)
                lower.parent = upper
                if upper.child is None:
                    upper.child = lower
                else:
                    upper.child.join(lower)
                upper.degree += 1
                node = upper
            by_degree[node.degree] = node
        for root in by_degree.values():
            self._add_root(root)


class HeapIndex(FreeIndex):
    """Stretches in a Fibonacci heap, the longest on top; of equals the lowest."""

    def __init__(self) -> None:
        self._heap = FibonacciHeap()
        self._nodes: dict[int, HeapNode] = {}

    def find(self, size: int) -> Span | None:
        top = self._heap.least
        if top is None or -top.key[0] < size:
            return None
        return top.key[1], -top.key[0]

    def add(self, start: int, size: int) -> None:
        self._nodes[start] = self._heap.push((-size, start))

    def remove(self, start: int, size: int) -> None:
        self._heap.remove(self._nodes.pop(start))

    def replace(self, old: Span, new: Span) -> None:
        if new[1] < old[1]:
            super().replace(old, new)
        else:
            node = self._nodes[new[0]] = self._nodes.pop(old[0])
            self._heap.decrease(node, (-new[1], new[0]))


class FibonacciHeapFit(IndexedAllocator):
    """Worst fit through a Fibonacci heap; places blocks exactly as `WorstFit` does."""

    make_index = HeapIndex
