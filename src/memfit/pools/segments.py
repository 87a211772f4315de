"""Real memory under PyTorch's caching allocator: its model says which segments to take, and the pool does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.chunks import DEVICE_ALIGNMENT_BYTES
from memfit.pools.chunks import Chunk, Space
from memfit.pools.memory import NoSystemMemory, RealMemory
from memfit.pools.policies import Policy

UNLIMITED_BYTES = 1 << 42


class Segments(Space):
    """Chunks that are the segments of one caching allocator: it takes them as it needs them, in the sizes of
    its own rules, and keeps what is free until `drop_empty` has it empty its cache."""

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        on_new: Callable[[Chunk], None],
        *,
        limit_bytes: int | None,
    ) -> None:
        super().__init__(policy, device, on_new)
        self._allocator = CachingAllocator(CachingConfig(total_bytes=limit_bytes or UNLIMITED_BYTES))
        self._by_region: dict[int, Chunk] = {}

    def place(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """A planned block where there is one, else wherever the caching allocator places it."""
        for chunk in self._chunks:
            if chunk.policy is not self._allocator and (block := chunk.place(size_bytes)) is not None:
                return chunk, block
        try:
            block = self._allocator.allocate(size_bytes)
        except OutOfMemory:
            self._follow()
            return None
        segment = self._by_region.get(block.region) or self._new_segment(block)
        if segment is None:
            return None
        segment.blocks += 1
        return segment, block

    def add(self, size_bytes: int, *, touch: bool = False) -> Chunk:
        """Have the allocator take a segment for a block of that size, and keep it free."""
        placed = self.place(size_bytes)
        if placed is None:
            raise NoSystemMemory(f"no segment of {size_bytes} bytes")
        chunk, block = placed
        chunk.give_back(block)
        if touch:
            chunk.memory.touch()
        return chunk

    def add_planned(self, policy: BaseAllocator, size_bytes: int) -> Chunk:
        """Take a chunk for a plan; its bytes are lost to the caching allocator."""
        size_bytes = -(-size_bytes // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES
        if not self._allocator.device.take(size_bytes):
            raise NoSystemMemory(f"{size_bytes} bytes are more than the limit leaves")
        try:
            memory = RealMemory(size_bytes, self.device, touch=True)
        except NoSystemMemory:
            self._allocator.device.give_back(size_bytes)
            raise
        return self._insert(Chunk(memory, policy, None, fixed=True), first=True)

    def remove(self, chunk: Chunk) -> None:
        """Give a planned chunk back; the allocator gives segments back itself, all that are empty."""
        if chunk.policy is self._allocator:
            self._allocator.empty_cache()
            self._follow()
            return
        super().remove(chunk)
        self._allocator.device.give_back(chunk.size_bytes)

    def drop_empty(self, *, until_bytes: int | None = None, keeping_bytes: int = 0) -> int:
        """Empty the cache. All of it goes, or nothing where that would leave less than is to be kept."""
        before = self.reserved_bytes
        if until_bytes == 0 or before - self.empty_bytes() < keeping_bytes:
            return 0
        for chunk in [chunk for chunk in self._chunks if chunk.empty and chunk.policy is not self._allocator]:
            self.remove(chunk)
        self._allocator.empty_cache()
        self._follow()
        return before - self.reserved_bytes

    def clear(self) -> None:
        super().clear()
        self._by_region.clear()

    def _new_segment(self, block: Block) -> Chunk | None:
        """Real memory for a segment that the allocator has just taken; None where the device has none."""
        region = self._allocator.regions[block.region]
        try:
            memory = RealMemory(region.size, self.device)
        except NoSystemMemory:
            self._allocator.deallocate(block)
            self._allocator.empty_cache()
            self._follow()
            return None
        self._follow()
        chunk = Chunk(memory, self._allocator, None, fixed=True)
        chunk.kept = False
        self._by_region[block.region] = chunk
        return self._insert(chunk)

    def _follow(self) -> None:
        """Let go of the segments that the allocator has given back."""
        for ordinal in [ordinal for ordinal in self._by_region if ordinal not in self._allocator.regions]:
            super().remove(self._by_region.pop(ordinal))
