"""Allocators around an allocator: a limit, a log, a count. They stack: ``limit(log(policy))``.

An adaptor hands out the blocks of the allocator inside it, so whatever is true of those stays true.
"""

from __future__ import annotations

import functools
import inspect
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.statistics import Gauge
from memfit.core.errors import UsageError


@functools.cache
def _takes_stream(kind: type[BaseAllocator]) -> bool:
    return "stream" in inspect.signature(kind.allocate).parameters


def allocate_on(allocator: BaseAllocator, size_bytes: int, stream: int) -> Block:
    """Allocate on a stream, also with a policy whose ``allocate(size)`` knows of none."""
    if stream and _takes_stream(type(allocator)):
        return allocator.allocate(size_bytes, stream=stream)
    return allocator.allocate(size_bytes)


class Adaptor(BaseAllocator):
    """An allocator around another one."""

    def __init__(self, inner: BaseAllocator) -> None:
        super().__init__(getattr(inner, "config", None))
        self.inner = inner

    @abstractmethod
    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block: ...

    @abstractmethod
    def deallocate(self, block: Block) -> None: ...

    def stats(self) -> Mapping[str, Any]:
        """Those of the allocator inside."""
        return self.inner.stats()


class LimitedAllocator(Adaptor):
    """No more than ``limit_bytes`` out at once, by the size of the blocks.

    Examples:
        >>> from memfit.allocators.fits import FirstFit
        >>> allocator = LimitedAllocator(FirstFit(), limit_bytes=1024)
        >>> block = allocator.allocate(1000)
        >>> allocator.allocate(1)
        Traceback (most recent call last):
        memfit.allocators.base.OutOfMemory: out of memory: 1 bytes asked for; of 1024 bytes, 1024 are ...
    """

    def __init__(self, inner: BaseAllocator, *, limit_bytes: int) -> None:
        super().__init__(inner)
        if limit_bytes < 0:
            raise UsageError(f"limit_bytes={limit_bytes}: a limit cannot be negative")
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """As the allocator inside; `OutOfMemory` also where the block would go over the limit."""
        # A block is at least what was asked for; how much more is known once it is there.
        if self.allocated_bytes + size_bytes > self.limit_bytes:
            raise self._over(size_bytes)
        block = allocate_on(self.inner, size_bytes, stream)
        if self.allocated_bytes + block.size_bytes > self.limit_bytes:
            self.inner.deallocate(block)
            raise self._over(size_bytes)
        self.allocated_bytes += block.size_bytes
        return block

    def deallocate(self, block: Block) -> None:
        self.inner.deallocate(block)
        self.allocated_bytes -= block.size_bytes

    def _over(self, size_bytes: int) -> OutOfMemory:
        return OutOfMemory(
            requested_bytes=size_bytes,
            reserved_bytes=self.allocated_bytes,
            limit_bytes=self.limit_bytes,
            allocated_bytes=self.allocated_bytes,
            largest_free_bytes=self.limit_bytes - self.allocated_bytes,
        )


class LoggedAllocator(Adaptor):
    """Writes every request as a JSON line that `memfit replay` reads.

    A request that failed is logged as allocated and freed at once: a replay through a policy with more room
    then goes on as the program did.
    """

    def __init__(self, inner: BaseAllocator, file: TextIO) -> None:
        super().__init__(inner)
        self._file = file
        self._numbers: dict[int, int] = {}  # block id -> number in the log
        self._count = 0
        total_bytes = getattr(self.config, "total_bytes", None)
        if total_bytes is not None:
            self._write({"op": "config", "total_bytes": total_bytes})

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """As the allocator inside."""
        if size_bytes < 0:  # refused by every policy, and no operation for a log
            return self.inner.allocate(size_bytes)
        number = self._count
        self._count += 1
        self._write({"op": "alloc", "id": number, "size": size_bytes, "stream": stream})
        try:
            block = allocate_on(self.inner, size_bytes, stream)
        except OutOfMemory:
            self._write({"op": "free", "id": number})
            raise
        self._numbers[block.block_id] = number
        return block

    def deallocate(self, block: Block) -> None:
        self.inner.deallocate(block)
        self._write({"op": "free", "id": self._numbers.pop(block.block_id)})

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What passed through a `CountedAllocator`.

    Attributes:
        allocations, frees, failures: how often; a failure is an `OutOfMemory`.
        live_blocks, peak_live_blocks: out now, and at most.
        requested_bytes, peak_requested_bytes: asked for by those.
        allocated_bytes, peak_allocated_bytes: the sizes of their blocks.
        sizes: how many requests lay below each power of two (and not below the one before it).
    """

    allocations: int
    frees: int
    failures: int
    live_blocks: int
    peak_live_blocks: int
    requested_bytes: int
    peak_requested_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    sizes: Mapping[int, int]


class CountedAllocator(Adaptor):
    """Counts what any policy does, also one that keeps no books of its own."""

    def __init__(self, inner: BaseAllocator) -> None:
        super().__init__(inner)
        self._blocks, self._requested, self._allocated = Gauge(), Gauge(), Gauge()
        self._calls = [0, 0, 0]
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """As the allocator inside."""
        try:
            block = allocate_on(self.inner, size_bytes, stream)
        except OutOfMemory:
            self._calls[2] += 1
            raise
        self._calls[0] += 1
        self._count(block, 1)
        limit = 1 << size_bytes.bit_length()
        self._sizes[limit] = self._sizes.get(limit, 0) + 1
        return block

    def deallocate(self, block: Block) -> None:
        self.inner.deallocate(block)
        self._calls[1] += 1
        self._count(block, -1)

    def _count(self, block: Block, sign: int) -> None:
        self._blocks.add(sign)
        self._requested.add(sign * block.requested_bytes)
        self._allocated.add(sign * block.size_bytes)

    def counts(self) -> Counts:
        """The numbers so far."""
        allocations, frees, failures = self._calls
        return Counts(
            allocations=allocations,
            frees=frees,
            failures=failures,
            live_blocks=self._blocks.current,
            peak_live_blocks=self._blocks.peak,
            requested_bytes=self._requested.current,
            peak_requested_bytes=self._requested.peak,
            allocated_bytes=self._allocated.current,
            peak_allocated_bytes=self._allocated.peak,
            sizes=dict(sorted(self._sizes.items())),
        )

    def stats(self) -> Mapping[str, Any]:
        """Those of the allocator inside, over what is counted here."""
        own = {
            "allocation": {"all": self._blocks.as_list()},
            "requested_bytes": {"all": self._requested.as_list()},
            "allocated_bytes": {"all": self._allocated.as_list()},
            "num_ooms": self._calls[2],
        }
        return own | dict(self.inner.stats())
