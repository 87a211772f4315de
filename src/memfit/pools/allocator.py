"""Real tensors allocated and freed by the policy of one's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes
from memfit.pools.holdings import Holder
from memfit.pools.policies import PolicyName
from memfit.pools.pool import MemoryPool
from memfit.pools.sites import calling_site
from memfit.pools.statistics import PoolStatistics


class MemoryAllocator:
    """Allocates and frees tensors by a policy that has a name.

    Args:
        policy: a name of ``memfit.allocators.ALLOCATORS`` (``"best_fit"`` …), or a subclass of
            `BaseAllocator`.
        capacity: the most that is ever taken from the device; None: what it has.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; the current CUDA device, or the CPU, if not given.
        settings: further settings of the `MemoryPool` beneath (``pool_size``, ``chunk_size``, ``poison``).

    Examples:
        >>> allocator = MemoryAllocator("best_fit", capacity="64MiB", device="cpu")
        >>> weight = allocator.allocate((256, 256), dtype=torch.float32)
        >>> weight.shape
        torch.Size([256, 256])
        >>> allocator.deallocate(weight)
        >>> allocator.statistics().allocated_bytes
        0
    """

    def __init__(
        self,
        policy: PolicyName = "best_fit",
        *,
        capacity: str | int | None = None,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> None:
        self.pool = MemoryPool(
            allocation_policy=policy,
            max_size=capacity,
            device=device,
            **{"name": "MemoryAllocator", **settings},
        )
        self._out = WeakTensorKeyDictionary()

    def allocate(self, size: str | int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, not initialised. Its memory is free when it and all that views it are gone.

        Args:
            size: a shape; or a number of bytes, whole or as text like ``"1GB"``, for one dimension.
            dtype: of the elements; if not given, torch's default for a shape and ``torch.uint8`` for bytes.

        Raises:
            OutOfPoolMemory: no room.
            UsageError: the bytes are no whole number of elements.
        """
        if isinstance(size, str | int):
            dtype = dtype or torch.uint8
            size_bytes = parse_bytes(size)
            if size_bytes % dtype.itemsize:
                raise UsageError(f"{size_bytes} bytes are no whole number of {dtype} elements")
            size = (size_bytes // dtype.itemsize,)
        tensor, holding = self.pool.carve(size, dtype or torch.get_default_dtype())
        self._out[tensor] = holding
        return tensor

    def deallocate(self, tensor: torch.Tensor) -> None:
        """Free a tensor now: it is left empty, with no element to read by mistake. Other tensors that view
        its memory stay valid and keep it until they are gone.

        Raises:
            UsageError: freed before, or not allocated here.
        """
        holding = self._out.pop(tensor, None)
        if holding is None:
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} was not allocated here, or was freed already"
            )
        holding.freed_at = calling_site()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def statistics(self) -> PoolStatistics:
        """What is reserved, allocated and free now, peaks and counts."""
        return self.pool.statistics()

    def holders(self) -> tuple[Holder, ...]:
        """Which lines of code hold how much, most first."""
        return self.pool.holders()

    def close(self) -> None:
        """Give the memory back; what tensors look into lives as they do."""
        self.pool.close()

    def __enter__(self) -> MemoryAllocator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.pool)
