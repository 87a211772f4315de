"""Binary buddies: blocks are powers of two, halved to serve a request and joined with their other half."""

from __future__ import annotations

from memfit.allocators.address_space import AddressSpaceAllocator, SpaceConfig, Span


class BuddyAllocator(AddressSpaceAllocator):
    """Binary buddy. A block's other half is found by flipping one bit of its offset.

    A range that is no power of two is made of several, the largest first; they are never joined. Sizes are
    counted in units of the alignment; of free blocks of one size the latest is taken.
    """

    def __init__(self, config: SpaceConfig | None = None) -> None:
        super().__init__(config)
        units = self.total_bytes // self.alignment_bytes
        self._free: list[dict[int, None]] = [{} for _ in range(units.bit_length())]
        self._filled = 0  # bit k: a block of 2**k units is free
        self._roots: dict[int, int] = {}  # unit where a whole power of two starts -> its order
        start = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self._roots[start] = order
                self._put(order, start)
                start += 1 << order

    def _take(self, size_bytes: int) -> Span | None:
        wanted = (size_bytes // self.alignment_bytes - 1).bit_length()
        fitting = self._filled >> wanted
        if not fitting:
            return None
        order = wanted + (fitting & -fitting).bit_length() - 1
        start, _ = self._free[order].popitem()
        self._forget_if_empty(order)
        while order > wanted:
            order -= 1
            self._put(order, start + (1 << order))
        return start * self.alignment_bytes, (1 << order) * self.alignment_bytes

    def _give_back(self, start: int, size_bytes: int) -> None:
        unit = start // self.alignment_bytes
        order = (size_bytes // self.alignment_bytes).bit_length() - 1
        while self._roots.get(unit) != order:
            other = unit ^ 1 << order
            if other not in self._free[order]:
                break
            del self._free[order][other]
            self._forget_if_empty(order)
            unit &= ~(1 << order)
            order += 1
        self._put(order, unit)

    def free_spans(self) -> list[Span]:
        unit = self.alignment_bytes
        return sorted(
            (start * unit, (1 << order) * unit) for order, starts in enumerate(self._free) for start in starts
        )

    def _put(self, order: int, start: int) -> None:
        self._free[order][start] = None
        self._filled |= 1 << order

    def _forget_if_empty(self, order: int) -> None:
        if not self._free[order]:
            self._filled &= ~(1 << order)
