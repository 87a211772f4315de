"""Slabs: small blocks of one size share a slab of slots; large ones, and the slabs, come from a best fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.allocators.address_space import AddressSpaceAllocator, AddressSpaceConfig, SpaceConfig, Span
from memfit.allocators.free_store import FreeStore
from memfit.allocators.indexed import TreeIndex

_LEAST_SLOTS = 8
_STEPS = 4
"""Slot sizes per power of two: a slot is at most a quarter larger than its block (plus alignment)."""


@dataclass(frozen=True, kw_only=True)
class SlabConfig(AddressSpaceConfig):
    """A range with slabs.

    Attributes:
        slab_bytes: size of a slab; blocks of up to an eighth of it are served from slabs. No slab is larger
            than a 64th of the range.
    """

    slab_bytes: int = 2 << 20


@dataclass(eq=False, slots=True)
class _Slab:
    start: int
    slot_bytes: int
    slots: int
    free: list[int] = field(default_factory=list)


class SlabAllocator(AddressSpaceAllocator):
    """Slab allocation (Bonwick, 1994): constant time for small blocks; an empty slab goes back at once.

    Where there is no room for a new slab, a block gets a stretch of its own, and at last a larger slot.
    """

    def __init__(self, config: SpaceConfig | None = None) -> None:
        super().__init__(config)
        wanted: int = getattr(config, "slab_bytes", SlabConfig.slab_bytes)
        unit = self.alignment_bytes
        self.slab_bytes = min(wanted, self.total_bytes // 64) // unit * unit
        self._largest_slot = self.slab_bytes // _LEAST_SLOTS
        self._store = FreeStore(TreeIndex(), self.total_bytes)
        self._partial: dict[int, dict[int, _Slab]] = {}  # slot size -> slabs with a free slot, by start
        self._slab_of: dict[int, _Slab] = {}  # a slot that is out -> its slab

    def _take(self, size_bytes: int) -> Span | None:
        slot_bytes = self._slot_size(size_bytes)
        if slot_bytes <= self._largest_slot and self._has_slot(slot_bytes):
            return self._slot_of(slot_bytes)
        start = self._store.take(size_bytes)
        if start is not None:
            return start, size_bytes
        larger = [slot for slot, slabs in self._partial.items() if slabs and slot >= size_bytes]
        return self._slot_of(min(larger)) if larger else None

    def _slot_of(self, slot_bytes: int) -> Span:
        slab = next(reversed(self._partial[slot_bytes].values()))
        start = slab.free.pop()
        self._slab_of[start] = slab
        if not slab.free:
            del self._partial[slot_bytes][slab.start]
        return start, slot_bytes

    def _give_back(self, start: int, size_bytes: int) -> None:
        slab = self._slab_of.pop(start, None)
        if slab is None:
            self._store.give_back(start, size_bytes)
            return
        slab.free.append(start)
        partial = self._partial[slab.slot_bytes]
        if len(slab.free) == slab.slots:
            partial.pop(slab.start, None)
            self._store.give_back(slab.start, self.slab_bytes)
        else:
            partial[slab.start] = slab

    def free_spans(self) -> list[Span]:
        slots = (
            (start, slab.slot_bytes)
            for slabs in self._partial.values()
            for slab in slabs.values()
            for start in slab.free
        )
        return sorted([*self._store.spans(), *slots])

    def _slot_size(self, size_bytes: int) -> int:
        """The slot for a size: up to the next quarter of a power of two, in whole alignments."""
        step = max(1 << max(0, (size_bytes - 1).bit_length() - 1), _STEPS) // _STEPS
        step = -(-step // self.alignment_bytes) * self.alignment_bytes
        return -(-size_bytes // step) * step

    def _has_slot(self, slot_bytes: int) -> bool:
        """Whether there is a slab with a free slot of this size, after a new one was made if need be."""
        partial = self._partial.setdefault(slot_bytes, {})
        if partial:
            return True
        start = self._store.take(self.slab_bytes)
        if start is None:
            return False
        slots = self.slab_bytes // slot_bytes
        slab = partial[start] = _Slab(start, slot_bytes, slots)
        slab.free = [start + index * slot_bytes for index in reversed(range(slots))]
        return True
