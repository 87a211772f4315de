"""`GPUMemoryManager`: the short path through pools, policies and garbage collection. No logic of its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import psutil
import torch

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes
from memfit.pools import Defragmentation, Holder, MemoryHandle, MemoryPool, PoolStatistics
from memfit.pools.dynamic import DynamicAllocation
from memfit.pools.memory import usable_device
from memfit.pools.policies import PolicyName

AllocationStrategy = Literal["static", "dynamic"]

KEYS = (
    "total_memory",
    "available_memory",
    "allocation_policy",
    "allocation_strategy",
    "pool_size",
    "chunk_size",
    "device",
)
"""The settings of a manager, in Python and in the ``memory`` section of a configuration."""


class GPUMemoryManager:
    """Allocates and frees memory of one device, up to a limit, and says who holds it.

    Every setting may be given by keyword or in ``config``, a keyword first.

    Args:
        config: a mapping with any of the settings below.
        total_memory: of the device, as text or bytes; measured if not given.
        available_memory: how much of it this manager may take: the limit. What is free now if neither is
            given, all of ``total_memory`` if that alone is.
        allocation_policy: a name of ``memfit.allocators.ALLOCATORS``, or a subclass of `BaseAllocator`.
        allocation_strategy: ``"static"`` keeps to the policy; ``"dynamic"`` watches what is asked for and
            adapts (`DynamicAllocation`), and takes no policy beside it.
        pool_size: what to take from the device at once, before it is asked for.
        chunk_size: the least that is taken at a time.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; the current CUDA device, or the CPU, if not given.

    Raises:
        UsageError: an unknown key, or settings that exclude each other.

    Examples:
        >>> manager = GPUMemoryManager(total_memory="64MiB", device="cpu")
        >>> handle = manager.allocate(size="1MB")
        >>> handle.tensor(torch.float32, (500, 500)).fill_(2.0).mean().item()
        2.0
        >>> manager.deallocate(handle)
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        total_memory: str | int | None = None,
        available_memory: str | int | None = None,
        allocation_policy: PolicyName | None = None,
        allocation_strategy: AllocationStrategy | None = None,
        pool_size: str | int | None = None,
        chunk_size: str | int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        given = {
            "total_memory": total_memory,
            "available_memory": available_memory,
            "allocation_policy": allocation_policy,
            "allocation_strategy": allocation_strategy,
            "pool_size": pool_size,
            "chunk_size": chunk_size,
            "device": device,
        }
        settings = _merged(config or {}, given)
        self.device = usable_device(settings["device"])
        self.total_bytes, self.limit_bytes = _limits(
            settings["total_memory"], settings["available_memory"], self.device
        )
        self.pool = MemoryPool(
            pool_size=settings["pool_size"] or 0,
            chunk_size=settings["chunk_size"],
            max_size=self.limit_bytes,
            allocation_policy=_policy(settings["allocation_policy"], settings["allocation_strategy"]),
            device=self.device,
            name="GPUMemoryManager",
        )

    def allocate(self, size: str | int) -> MemoryHandle:
        """A block of ``size``: bytes, or text like ``"1GB"`` (10⁹) or ``"1GiB"`` (2³⁰).

        Raises:
            OutOfPoolMemory: past the limit, or more than the device has; says what is free and who holds
                the rest, by file and line.
            UsageError: not a size, or the manager is closed.
        """
        return self.pool.allocate(size)

    def deallocate(self, handle: MemoryHandle) -> None:
        """Take a block back; see `MemoryPool.deallocate`.

        Raises:
            UsageError: freed before, or of another manager.
        """
        self.pool.deallocate(handle)

    def statistics(self) -> PoolStatistics:
        """What is reserved, allocated and free now, peaks and counts; prints well."""
        return self.pool.statistics()

    def holders(self) -> tuple[Holder, ...]:
        """Which lines of code hold how much, most first."""
        return self.pool.holders()

    def defragment(self) -> Defragmentation:
        """Bring what is free into one piece; see `MemoryPool.defragment`."""
        return self.pool.defragment()

    def trim(self, keep: str | int = 0) -> int:
        """Give what is free back to the device, but for ``keep``; the bytes given back."""
        return self.pool.trim(keep)

    def close(self) -> None:
        """Give everything back; what tensors look into lives as they do."""
        self.pool.close()

    def __enter__(self) -> GPUMemoryManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.pool)


def _merged(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by keyword, else from the configuration.

    Raises:
        UsageError: a key that is none.
    """
    for key in config:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"unknown key {key!r} of GPUMemoryManager: {meant}there are {', '.join(KEYS)}")
    return {key: config.get(key) if value is None else value for key, value in given.items()}


def _limits(total: str | int | None, available: str | int | None, device: torch.device) -> tuple[int, int]:
    """The device's bytes and how many of them may be taken."""
    free_bytes, all_bytes = _measured(device)
    total_bytes = all_bytes if total is None else parse_bytes(total, what="total_memory")
    if available is None:
        return total_bytes, free_bytes if total is None else total_bytes
    limit_bytes = parse_bytes(available, what="available_memory")
    if limit_bytes > total_bytes:
        whose = f"total_memory {total!r}" if total is not None else f"the {total_bytes} bytes of {device}"
        raise UsageError(f"available_memory {available!r} is more than {whose}: lower it")
    return total_bytes, limit_bytes


def _measured(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of the device, now."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes), int(total_bytes)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _policy(policy: PolicyName | None, strategy: str | None) -> PolicyName:
    if strategy in (None, "static"):
        return policy or "best_fit"
    if strategy != "dynamic":
        raise UsageError(f"allocation_strategy {strategy!r}: there are static and dynamic")
    if policy is not None:
        raise UsageError(
            f"allocation_strategy dynamic chooses its policy itself: leave allocation_policy ({policy}) out"
        )
    return DynamicAllocation
