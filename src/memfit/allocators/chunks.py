"""The mutable pieces inside the caching allocator: device ranges, the chunks in them, free lists."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from memfit.core.errors import UsageError

DEVICE_BASE_ADDRESS = 0x100000000000
DEVICE_ALIGNMENT_BYTES = 2 << 20
ORDER_BITS = 60
"""A free chunk's sort key is one integer: its size above these bits, the order among equal sizes below."""
CREATION_SHIFT = 34
"""Within that order: the region's ordinal above these bits, 512-byte blocks from its start below (8 TiB)."""


class State(IntEnum):
    """What a chunk is used for."""

    FREE = 0
    ALLOCATED = 1
    PENDING = 2  # freed, but a stream that it was recorded on has not passed that point yet
    UNMAPPED = 3  # address space of an expandable range without memory behind it


FREE, ALLOCATED, PENDING, UNMAPPED = (int(state) for state in State)


class Region:
    """One range of device addresses: a ``cudaMalloc``, or a reservation filled page by page."""

    __slots__ = ("address", "first", "ordinal", "page_bytes", "size")

    def __init__(self, *, ordinal: int, address: int, size: int, page_bytes: int = 0) -> None:
        self.ordinal = ordinal
        self.address = address
        self.size = size
        self.page_bytes = page_bytes  # 0: not expandable
        self.first: Chunk


class Chunk:
    """A stretch of a region, linked to its neighbours. Plain attributes: replays live in here."""

    __slots__ = (
        "born",
        "home",
        "next",
        "offset",
        "order",
        "prev",
        "region",
        "requested",
        "size",
        "state",
        "streams",
    )

    def __init__(self, region: Region, home: FreeList, offset: int, size: int, order: int) -> None:
        self.region = region
        self.home = home
        self.offset = offset
        self.size = size
        self.order = order  # breaks ties between equal sizes
        self.requested = 0
        self.state = FREE
        self.prev: Chunk | None = None
        self.next: Chunk | None = None
        self.streams: set[int] | None = None  # other streams that use it
        self.born = 0  # searches of the pool when it was freed; its age for garbage collection

    @property
    def address(self) -> int:
        return self.region.address + self.offset


@dataclass(slots=True)
class Counters:
    """Running totals of one pool. Those freed are ``total - current``; peaks are noted by the allocator."""

    count: int = 0
    count_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    requested: int = 0
    requested_total: int = 0
    pending_count: int = 0
    pending_bytes: int = 0
    reserved: int = 0
    reserved_total: int = 0
    segments: int = 0
    segments_total: int = 0
    split_count: int = 0
    split_count_total: int = 0
    split_bytes: int = 0
    split_bytes_total: int = 0


@dataclass(slots=True)
class PoolShare:
    """What the free lists of one pool share, whatever their stream: a private pool's number (0: none),
    whether it was released, and how often it was searched, which is the clock of garbage collection."""

    pool: int = 0
    released: bool = False
    searches: int = 0


class FreeList:
    """The free chunks of a pool on one stream, in best-fit order; unmapped ones in address order."""

    __slots__ = ("chunks", "counters", "keys", "shared", "small", "stream", "unmapped", "unmapped_addresses")

    def __init__(self, *, small: bool, stream: int, counters: Counters, shared: PoolShare) -> None:
        self.small = small
        self.stream = stream
        self.counters = counters
        self.shared = shared
        self.keys: list[int] = []
        self.chunks: dict[int, Chunk] = {}
        self.unmapped_addresses: list[int] = []
        self.unmapped: dict[int, Chunk] = {}

    def insert(self, chunk: Chunk) -> None:
        key = (chunk.size << ORDER_BITS) | chunk.order
        insort(self.keys, key)
        self.chunks[key] = chunk
        chunk.born = self.shared.searches

    def remove(self, chunk: Chunk) -> None:
        key = (chunk.size << ORDER_BITS) | chunk.order
        del self.keys[bisect_left(self.keys, key)]
        del self.chunks[key]

    def clear(self) -> None:
        """Forget all of them."""
        for held in (self.keys, self.chunks, self.unmapped_addresses, self.unmapped):
            held.clear()

    def in_order(self) -> list[Chunk]:
        """The free chunks, smallest first."""
        return [self.chunks[key] for key in self.keys]

    def insert_unmapped(self, chunk: Chunk) -> None:
        address = chunk.address
        insort(self.unmapped_addresses, address)
        self.unmapped[address] = chunk

    def remove_unmapped(self, chunk: Chunk) -> None:
        address = chunk.address
        del self.unmapped_addresses[bisect_left(self.unmapped_addresses, address)]
        del self.unmapped[address]


class Device:
    """The memory that segments are taken from: bytes are counted, addresses only ever go up."""

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise UsageError(
                f"total_bytes of the device is {total_bytes}; give the size of its memory in bytes"
            )
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self._top = DEVICE_BASE_ADDRESS
        self._ranges = 0

    def take(self, size: int) -> bool:
        """Take physical memory, if there is that much."""
        if self.used_bytes + size > self.total_bytes:
            return False
        self.used_bytes += size
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return True

    def recorded_segments(self) -> npt.NDArray[np.int64]:
        """Segments whose addresses are known in advance: rows of size, address and 0, by size; here none."""
        return np.zeros((0, 3), dtype=np.int64)

    def give_back(self, size: int) -> None:
        self.used_bytes -= size

    def new_region(self, size: int, *, page_bytes: int = 0) -> Region:
        """A range of addresses right above all that were ever used."""
        region = Region(ordinal=self._ranges, address=self._top, size=size, page_bytes=page_bytes)
        self._ranges += 1
        self._top += -(-size // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES
        return region
