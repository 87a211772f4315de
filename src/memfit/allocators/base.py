"""What an allocation policy is: the interface, the block it hands out, and how it says that memory is out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import MemfitError


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of memory that an allocator has handed out.

    Attributes:
        block_id: unique within its allocator; never used again.
        address: first byte; 0 for an empty request, which holds no memory.
        size_bytes: what the allocator gave (its rounding included).
        requested_bytes: what was asked for.
        stream: the stream it was allocated on (0 is the default stream).
        region: ordinal of the range taken from the device that it lies in (-1: none).
        offset_bytes: where in that range it starts.
    """

    block_id: int
    address: int
    size_bytes: int
    requested_bytes: int
    stream: int = 0
    region: int = 0
    offset_bytes: int


class OutOfMemory(MemfitError):
    """An allocation that does not fit; the allocator's state is as after the failed attempt."""

    def __init__(
        self,
        *,
        requested_bytes: int,
        reserved_bytes: int,
        limit_bytes: int,
        allocated_bytes: int,
        largest_free_bytes: int | None = None,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes
        self.allocated_bytes = allocated_bytes
        self.largest_free_bytes = largest_free_bytes
        largest = (
            "" if largest_free_bytes is None else f"; the largest free block has {largest_free_bytes} bytes"
        )
        super().__init__(
            f"out of memory: {requested_bytes} bytes asked for; of {limit_bytes} bytes,"
            f" {reserved_bytes} are reserved and {allocated_bytes} allocated{largest}"
        )


class BaseAllocator(ABC):
    """An allocation policy over a made-up address space.

    A subclass takes its settings in ``__init__(config)``; whoever replays a trace through it needs no more
    than `allocate` and `deallocate`. ``config`` has at least ``total_bytes`` and ``alignment_bytes``.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Hand out a block of at least ``size_bytes``.

        Raises:
            OutOfMemory: nothing that fits is left.
            UsageError: the size is negative.
        """

    @abstractmethod
    def deallocate(self, block: Block) -> None:
        """Take a block back.

        Raises:
            UsageError: the block is not one that this allocator has out (freed twice, or foreign).
        """

    def stats(self) -> Mapping[str, Any]:
        """Counters of the policy: ``allocated_bytes``, ``reserved_bytes`` and ``requested_bytes`` at least,
        each ``{"all": [current, peak, allocated, freed]}`` in bytes; empty for a policy that keeps none
        (wrap it in a `CountedAllocator`)."""
        return {}
