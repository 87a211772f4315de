"""TLSF, two-level segregated fit (Masmano et al., 2004): a good fit in constant time, through two bitmaps."""

from __future__ import annotations

from memfit.allocators.address_space import Span
from memfit.allocators.free_store import FreeIndex, IndexedAllocator

_STEPS_LOG2 = 4
_STEPS = 1 << _STEPS_LOG2
"""Lists per power of two: a list holds sizes within a sixteenth of each other."""


class TwoLevelClasses(FreeIndex):
    """Stretches by power of two (first level) and sixteenth within it (second level)."""

    def __init__(self) -> None:
        self._lists: list[list[dict[int, int]]] = [[{} for _ in range(_STEPS)] for _ in range(64)]
        self._first_level = 0
        self._second_level = [0] * 64

    def find(self, size: int) -> Span | None:
        # Rounded up to the next list, so that whatever lies there is long enough: no list is searched.
        first, second = _list_of(size + max(0, (1 << (size.bit_length() - 1)) // _STEPS - 1))
        filled = self._second_level[first] >> second << second
        if not filled:
            above = self._first_level >> (first + 1)
            if not above:
                return self._find_in_own(size)
            first += (above & -above).bit_length()
            filled = self._second_level[first]
        second = (filled & -filled).bit_length() - 1
        return next(reversed(self._lists[first][second].items()))

    def _find_in_own(self, size: int) -> Span | None:
        """The last resort before out of memory: the list that rounding up had passed over."""
        first, second = _list_of(size)
        return next((span for span in self._lists[first][second].items() if span[1] >= size), None)

    def add(self, start: int, size: int) -> None:
        first, second = _list_of(size)
        self._lists[first][second][start] = size
        self._second_level[first] |= 1 << second
        self._first_level |= 1 << first

    def remove(self, start: int, size: int) -> None:
        first, second = _list_of(size)
        own = self._lists[first][second]
        del own[start]
        if not own:
            self._second_level[first] &= ~(1 << second)
            if not self._second_level[first]:
                self._first_level &= ~(1 << first)


def _list_of(size: int) -> tuple[int, int]:
    first = size.bit_length() - 1
    return first, (size << _STEPS_LOG2 >> first) - _STEPS


class TwoLevelSegregatedFit(IndexedAllocator):
    """TLSF."""

    make_index = TwoLevelClasses
