"""What a pool hands out: a handle, and behind it the lease that dies when nothing can reach the block."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes
from memfit.pools.memory import elements
from memfit.pools.sites import Site

if TYPE_CHECKING:
    from memfit.pools.holdings import Holding
    from memfit.pools.pool import MemoryPool


class Lease:
    """The right to a block. Its handle and the pin of its tensors hold it; the pool has a weak reference,
    and takes the block back when it dies."""

    __slots__ = ("__weakref__", "holding", "pin")

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.pin: weakref.ref[Pin] | None = None

    def pinned(self) -> bool:
        """Whether a tensor or buffer looks into the block, which must stay where it is for that."""
        return self.pin is not None and self.pin() is not None

    def new_pin(self) -> Pin:
        """The pin of the tensors that look into the block; the same for all of them."""
        pin = None if self.pin is None else self.pin()
        if pin is None:
            pin = Pin(self)
            self.pin = weakref.ref(pin)
        return pin


class Pin:
    """Held by every tensor and buffer that looks into a block, through their storage."""

    __slots__ = ("__weakref__", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


class MemoryHandle:
    """A block of real memory, and the way to tensors in it.

    The block goes back to its pool when it is deallocated, or when the handle is gone; in both cases not
    before the last tensor or buffer that looks into it is gone too. After `MemoryPool.deallocate` the handle
    gives no tensor any more.

    Attributes:
        size_bytes: what was asked for.
        site: where it was asked for.

    Examples:
        >>> from memfit import MemoryPool
        >>> handle = MemoryPool(pool_size="1MiB", device="cpu").allocate("4KiB")
        >>> handle.tensor(torch.float32, (32, 32)).fill_(1.0).sum().item()
        1024.0
    """

    __slots__ = ("__weakref__", "_freed_at", "_lease", "_pool", "site", "size_bytes")

    def __init__(self, pool: MemoryPool, lease: Lease, size_bytes: int, site: Site) -> None:
        self._pool = pool
        self._lease: Lease | None = lease
        self._freed_at: Site | None = None
        self.size_bytes = size_bytes
        self.site = site

    @property
    def alive(self) -> bool:
        """Whether it still gives tensors: not deallocated, and its pool not closed."""
        return self._lease is not None and not self._pool.closed

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._pool.device

    @property
    def allocated_bytes(self) -> int:
        """What the block takes, the policy's rounding included."""
        return self.lease().holding.size_bytes

    @property
    def address(self) -> int:
        """The first byte, now: the pool may move a block that no tensor looks into."""
        return self.lease().holding.address

    def tensor(
        self, dtype: torch.dtype = torch.uint8, shape: int | Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor over the block, from its first byte; not initialised.

        Args:
            dtype: of the elements.
            shape: of the tensor; as many elements as fit, in one dimension, if not given.

        Raises:
            UsageError: the handle was deallocated, or the tensor would be larger than the block.
        """
        if shape is None:
            shape = self.size_bytes // dtype.itemsize
        sizes, size_bytes = elements(shape if isinstance(shape, int) else tuple(shape), dtype)
        if size_bytes > self.size_bytes:
            raise UsageError(
                f"a {dtype} tensor of shape {sizes} has {format_bytes(size_bytes)}; this block has"
                f" {format_bytes(self.size_bytes)} (allocated at {self.site})"
            )
        return self._pool.tensor_of(self, dtype, sizes)

    @property
    def buffer(self) -> memoryview:
        """The bytes of the block for Python's buffer protocol, writable (memory of the CPU only)."""
        return self._pool.buffer_of(self)

    def record_stream(self, stream: Any) -> None:
        """Have the block wait, once it is free, for what ``stream`` has been given to do by then; as
        `torch.Tensor.record_stream`, which knows nothing of memory that is not torch's own."""
        self._pool.record_stream(self, stream)

    def lease(self) -> Lease:
        """What the pool needs of it: the lease of its block.

        Raises:
            UsageError: use after free.
        """
        lease = self._lease
        if lease is None:
            raise UsageError(
                f"use after free: the block of {format_bytes(self.size_bytes)} allocated at {self.site}"
                f" was deallocated at {self._freed_at}"
            )
        if self._pool.closed:
            raise UsageError(f"use after free: the pool of the block allocated at {self.site} is closed")
        return lease

    def __enter__(self) -> MemoryHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.alive:
            self._pool.deallocate(self)

    def __repr__(self) -> str:
        state = "" if self.alive else ", freed"
        return f"<MemoryHandle {format_bytes(self.size_bytes)} on {self.device} from {self.site}{state}>"

    def __reduce__(self) -> NoReturn:
        """One block has one handle: neither copy nor pickle may make a second."""
        raise UsageError("a memory handle cannot be copied or pickled: copy the tensor that it gives")
