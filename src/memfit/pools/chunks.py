"""Chunks of real memory, and where in them the policy places blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import torch

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.core.errors import ToolFailure
from memfit.pools.memory import RealMemory
from memfit.pools.policies import Policy

_NEVER_REFUSED = 1 << 63


class Chunk:
    """One piece of real memory, and the policy that places blocks in it."""

    __slots__ = ("blocks", "fixed", "kept", "memory", "places", "policy", "refused_bytes")

    def __init__(
        self, memory: RealMemory, policy: BaseAllocator, places: Places | None, *, fixed: bool = False
    ) -> None:
        self.memory = memory
        self.fixed = fixed  # its places are planned: blocks do not move, and what fits is no matter of size
        self.kept = fixed  # stays when it is empty
        self.policy = policy
        self.places = places
        self.blocks = 0
        self.refused_bytes = _NEVER_REFUSED  # the least that found no room since something was given back

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes

    @property
    def empty(self) -> bool:
        """Whether it may be given back."""
        return not self.blocks and not self.kept

    def place(self, size_bytes: int) -> Block | None:
        """A block, or None where the policy finds no room."""
        if size_bytes >= self.refused_bytes:
            return None
        try:
            block = self.policy.allocate(size_bytes)
        except OutOfMemory:
            if not self.fixed:
                self.refused_bytes = size_bytes
            return None
        if self.places is not None:
            self.places.add(block, size_bytes)
        self.blocks += 1
        return block

    def give_back(self, block: Block) -> None:
        """The block is free again."""
        if self.places is not None:
            self.places.remove(block)
        self.policy.deallocate(block)
        self.blocks -= 1
        self.refused_bytes = _NEVER_REFUSED


class Places:
    """The blocks that a policy has out in one chunk, to check a policy that others have written."""

    def __init__(self, total_bytes: int, alignment_bytes: int, policy_name: str) -> None:
        self._total_bytes = total_bytes
        self._alignment_bytes = alignment_bytes
        self._policy_name = policy_name
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, block: Block, asked_bytes: int) -> None:
        """Note a new block.

        Raises:
            ToolFailure: it lies outside, on top of another, out of alignment, or is too small.
        """
        if not isinstance(block, Block):
            raise ToolFailure(
                f"the allocation policy {self._policy_name} is wrong: for {asked_bytes} bytes it gave"
                f" {block!r}, which is no Block"
            )
        start, end = block.offset_bytes, block.offset_bytes + block.size_bytes
        index = bisect_right(self._starts, start)
        fault = self._fault(start, end, asked_bytes, index)
        if fault:
            raise ToolFailure(
                f"the allocation policy {self._policy_name} is wrong: for {asked_bytes} bytes it gave"
                f" [{start}, {end}), which {fault}"
            )
        self._starts.insert(index, start)
        self._ends.insert(index, end)

    def remove(self, block: Block) -> None:
        index = bisect_left(self._starts, block.offset_bytes)
        del self._starts[index], self._ends[index]

    def _fault(self, start: int, end: int, asked_bytes: int, index: int) -> str:
        if end - start < asked_bytes:
            return "is smaller"
        if start < 0 or end > self._total_bytes:
            return f"lies outside of its {self._total_bytes} bytes"
        if start % self._alignment_bytes:
            return f"does not start at a multiple of {self._alignment_bytes}"
        if index and self._ends[index - 1] > start:
            return f"lies on the block [{self._starts[index - 1]}, {self._ends[index - 1]})"
        if index < len(self._starts) and self._starts[index] < end:
            return f"lies on the block [{self._starts[index]}, {self._ends[index]})"
        return ""


class Space(ABC):
    """The chunks of a pool, and how more of them are had.

    Args:
        policy: places blocks.
        device: where chunks are taken from.
        on_new: told of every new chunk.
    """

    def __init__(self, policy: Policy, device: torch.device, on_new: Callable[[Chunk], None]) -> None:
        self.policy = policy
        self.device = device
        self._on_new = on_new
        self._chunks: list[Chunk] = []
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.added = self.dropped = 0

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    @abstractmethod
    def place(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """A block in a chunk that has room."""

    @abstractmethod
    def add(self, size_bytes: int, *, touch: bool = False) -> Chunk:
        """Take another chunk from the device.

        Raises:
            NoSystemMemory: it has none of that size.
        """

    @abstractmethod
    def add_planned(self, policy: BaseAllocator, size_bytes: int) -> Chunk:
        """Take a chunk that places blocks by a policy of its own, before all others.

        Raises:
            NoSystemMemory: the device has none of that size.
        """

    @abstractmethod
    def drop_empty(self, *, until_bytes: int | None = None, keeping_bytes: int = 0) -> int:
        """Give empty chunks back to the device until ``until_bytes`` are (None: all), and while
        ``keeping_bytes`` stay; the bytes given back."""

    def remove(self, chunk: Chunk) -> None:
        """Give a chunk back to the device."""
        self._chunks.remove(chunk)
        self.reserved_bytes -= chunk.size_bytes
        self.dropped += 1

    def clear(self) -> None:
        """Give all back."""
        self._chunks.clear()
        self.reserved_bytes = 0

    def adopt(self, old: Chunk, new: Chunk) -> None:
        """Put a chunk in another's place, over the same memory."""
        self._chunks[self._chunks.index(old)] = new

    def empty_bytes(self) -> int:
        """What `drop_empty` could give back."""
        return sum(chunk.size_bytes for chunk in self._chunks if chunk.empty)

    def _insert(self, chunk: Chunk, *, first: bool = False) -> Chunk:
        self._chunks.insert(0 if first else len(self._chunks), chunk)
        self.added += 1
        self.reserved_bytes += chunk.size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._on_new(chunk)
        return chunk


class Chunks(Space):
    """Chunks that each have a policy of their own."""

    def __init__(
        self, policy: Policy, device: torch.device, on_new: Callable[[Chunk], None], *, alignment_bytes: int
    ) -> None:
        super().__init__(policy, device, on_new)
        self._alignment_bytes = alignment_bytes

    def place(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """A block in the first chunk that has room."""
        for chunk in self._chunks:
            block = chunk.place(size_bytes)
            if block is not None:
                return chunk, block
        return None

    def add(self, size_bytes: int, *, touch: bool = False) -> Chunk:
        """Take another chunk of exactly that size."""
        return self._insert(self.over(RealMemory(size_bytes, self.device, touch=touch)))

    def add_planned(self, policy: BaseAllocator, size_bytes: int) -> Chunk:
        """Take a chunk for a plan."""
        memory = RealMemory(size_bytes, self.device, touch=True)
        return self._insert(Chunk(memory, policy, None, fixed=True), first=True)

    def over(self, memory: RealMemory) -> Chunk:
        """The policy over a piece of memory, with nothing in it; `adopt` puts it in another's place."""
        total, alignment = memory.size_bytes, self._alignment_bytes
        places = None if self.policy.trusted else Places(total, alignment, self.policy.name)
        return Chunk(memory, self.policy.over(total, alignment), places)

    def drop_empty(self, *, until_bytes: int | None = None, keeping_bytes: int = 0) -> int:
        """Give empty chunks back, the largest first."""
        dropped = 0
        for chunk in sorted(self._chunks, key=lambda chunk: chunk.size_bytes, reverse=True):
            if until_bytes is not None and dropped >= until_bytes:
                break
            if chunk.empty and self.reserved_bytes - chunk.size_bytes >= keeping_bytes:
                self.remove(chunk)
                dropped += chunk.size_bytes
        return dropped
