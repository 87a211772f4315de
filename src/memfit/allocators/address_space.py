"""What the textbook policies share: one range of addresses, its books, and who may give what back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.chunks import DEVICE_BASE_ADDRESS
from memfit.allocators.statistics import Gauge
from memfit.core.errors import UsageError

Span = tuple[int, int]
"""Where a stretch starts and how long it is, in bytes."""


class SpaceConfig(Protocol):
    """What a policy over one range reads from its config; any object with these will do."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def alignment_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class AddressSpaceConfig:
    """One range of memory.

    Attributes:
        total_bytes: its size.
        alignment_bytes: sizes are rounded up to multiples of it, and offsets are multiples.
    """

    total_bytes: int = 80 << 30
    alignment_bytes: int = 512


class AddressSpaceAllocator(BaseAllocator):
    """A policy over one range of fixed size; subclasses say where a block goes.

    All memory counts as reserved from the start. Streams share the range: a block that was given back can be
    handed out again at once, on any stream.
    """

    def __init__(self, config: SpaceConfig | None = None) -> None:
        config = config or AddressSpaceConfig()
        if config.alignment_bytes < 1:
            raise UsageError(f"alignment_bytes={config.alignment_bytes}: it must be at least 1")
        if config.total_bytes < config.alignment_bytes:
            raise UsageError(
                f"total_bytes={config.total_bytes}: it must hold at least one block of"
                f" {config.alignment_bytes} bytes (alignment_bytes)"
            )
        self.config: Any = config
        self.alignment_bytes = config.alignment_bytes
        self.total_bytes = config.total_bytes // config.alignment_bytes * config.alignment_bytes
        self._out: dict[int, Block] = {}
        self._next_id = 0
        self._allocated, self._requested, self._count = Gauge(), Gauge(), Gauge()
        self._ooms = 0

    @abstractmethod
    def _take(self, size_bytes: int) -> Span | None:
        """A free stretch of at least ``size_bytes`` (a multiple of the alignment), now taken; or None."""

    @abstractmethod
    def _give_back(self, start: int, size_bytes: int) -> None:
        """Free a stretch that `_take` gave."""

    @abstractmethod
    def free_spans(self) -> list[Span]:
        """The free blocks ``(offset, size)``, in address order."""

    def largest_free_bytes(self) -> int:
        """The size of the largest free block."""
        return max((size for _, size in self.free_spans()), default=0)

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Hand out a block. An empty request gets a block without memory.

        Raises:
            OutOfMemory: no free block is large enough; nothing has changed.
            UsageError: a negative size.
        """
        if size_bytes < 0:
            raise UsageError(f"allocate({size_bytes}): a size cannot be negative")
        start, given, region = 0, 0, -1
        if size_bytes:
            alignment = self.alignment_bytes
            span = self._take(-(-size_bytes // alignment) * alignment)
            if span is None:
                raise self._out_of_memory(size_bytes)
            (start, given), region = span, 0
            self._allocated.add(given)
            self._requested.add(size_bytes)
            self._count.add(1)
        block = Block(
            block_id=self._next_id,
            address=DEVICE_BASE_ADDRESS + start if size_bytes else 0,
            size_bytes=given,
            requested_bytes=size_bytes,
            stream=stream,
            region=region,
            offset_bytes=start,
        )
        self._out[self._next_id] = block
        self._next_id += 1
        return block

    def deallocate(self, block: Block) -> None:
        """Take a block back; free neighbours are joined as far as the policy can.

        Raises:
            UsageError: the block is not out: freed already, or another allocator's.
        """
        if self._out.get(block.block_id) is not block:
            raise UsageError(
                f"deallocate: block {block.block_id} ({block.requested_bytes} bytes at offset"
                f" {block.offset_bytes}) is not out: it was freed already, or another allocator handed it out"
            )
        del self._out[block.block_id]
        if block.size_bytes:
            self._give_back(block.offset_bytes, block.size_bytes)
            self._allocated.add(-block.size_bytes)
            self._requested.add(-block.requested_bytes)
            self._count.add(-1)

    def _out_of_memory(self, size_bytes: int) -> OutOfMemory:
        self._ooms += 1
        return OutOfMemory(
            requested_bytes=size_bytes,
            reserved_bytes=self.total_bytes,
            limit_bytes=self.total_bytes,
            allocated_bytes=self._allocated.current,
            largest_free_bytes=self.largest_free_bytes(),
        )

    def stats(self) -> dict[str, Any]:
        """As `BaseAllocator.stats`, and ``num_ooms``, ``free_block_count`` and ``largest_free_bytes``."""
        spans = self.free_spans()
        return {
            "allocation": {"all": self._count.as_list()},
            "allocated_bytes": {"all": self._allocated.as_list()},
            "requested_bytes": {"all": self._requested.as_list()},
            "reserved_bytes": {"all": [self.total_bytes, self.total_bytes, self.total_bytes, 0]},
            "num_ooms": self._ooms,
            "free_block_count": len(spans),
            "largest_free_bytes": max((size for _, size in spans), default=0),
        }
