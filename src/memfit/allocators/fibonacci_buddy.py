"""Fibonacci buddies: blocks have Fibonacci sizes, so a split is uneven and the sizes lie closer together.

A block of the k-th size splits into one of the (k-1)-th, left, and one of the (k-2)-th, right. Which half a
block is, and what its ancestors were, is kept in two bits a block (Hinds, 1975): `left`, whether it is a left
half; and `inherited`, which carries the parent's `left` bit down the left and its `inherited` bit down the
right, so that joining two halves gives back both bits of their parent.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from memfit.allocators.address_space import AddressSpaceAllocator, SpaceConfig, Span


class _Tag(NamedTuple):
    left: bool
    inherited: bool


_ROOT = _Tag(False, False)


class FibonacciBuddyAllocator(AddressSpaceAllocator):
    """Fibonacci buddy, in units of the alignment; the range is cut into such sizes, the largest first."""

    def __init__(self, config: SpaceConfig | None = None) -> None:
        super().__init__(config)
        units = self.total_bytes // self.alignment_bytes
        self._sizes = [1, 1]
        while self._sizes[-1] + self._sizes[-2] <= units:
            self._sizes.append(self._sizes[-1] + self._sizes[-2])
        self._free: list[dict[int, _Tag]] = [{} for _ in self._sizes]
        self._filled = 0
        self._out_blocks: dict[int, tuple[int, _Tag]] = {}  # two orders have one unit
        self._roots: dict[int, int] = {}
        start = 0
        for order in reversed(range(len(self._sizes))):
            while self._sizes[order] <= units - start:
                self._roots[start] = order
                self._put(order, start, _ROOT)
                start += self._sizes[order]

    def _take(self, size_bytes: int) -> Span | None:
        wanted = bisect_left(self._sizes, size_bytes // self.alignment_bytes)
        fitting = self._filled >> wanted
        if not fitting:
            return None
        order = wanted + (fitting & -fitting).bit_length() - 1
        start, tag = self._free[order].popitem()
        self._forget_if_empty(order)
        while order > max(wanted, 1):  # a block of one unit is not split
            middle = start + self._sizes[order - 1]
            left, right = _Tag(True, tag.left), _Tag(False, tag.inherited)
            if wanted <= order - 2:
                self._put(order - 1, start, left)
                order, start, tag = order - 2, middle, right
            else:
                self._put(order - 2, middle, right)
                order, tag = order - 1, left
        self._out_blocks[start] = order, tag
        return start * self.alignment_bytes, self._sizes[order] * self.alignment_bytes

    def _give_back(self, start: int, size_bytes: int) -> None:
        unit = start // self.alignment_bytes
        order, tag = self._out_blocks.pop(unit)
        while self._roots.get(unit) != order:
            other_order = order - 1 if tag.left else order + 1
            other = unit + self._sizes[order] if tag.left else unit - self._sizes[other_order]
            buddy = self._free[other_order].pop(other, None)
            if buddy is None:
                break
            self._forget_if_empty(other_order)
            left, right = (tag, buddy) if tag.left else (buddy, tag)
            unit, order = min(unit, other), max(order, other_order) + 1
            tag = _Tag(left.inherited, right.inherited)
        self._put(order, unit, tag)

    def free_spans(self) -> list[Span]:
        unit = self.alignment_bytes
        return sorted(
            (start * unit, self._sizes[order] * unit)
            for order, starts in enumerate(self._free)
            for start in starts
        )

    def _put(self, order: int, start: int, tag: _Tag) -> None:
        self._free[order][start] = tag
        self._filled |= 1 << order

    def _forget_if_empty(self, order: int) -> None:
        if not self._free[order]:
            self._filled &= ~(1 << order)
