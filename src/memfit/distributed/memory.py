"""`DistributedMemory`: blocks of memory that lie over several ranks, under torchrun or from a notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes
from memfit.distributed import groups
from memfit.distributed.memory_state import MemoryStatistics, Rebalanced
from memfit.distributed.rank_memory import RankMemory
from memfit.distributed.sharding import ShardedBlock, Split
from memfit.distributed.workers import Workers

_DTYPES = {dtype.__str__().removeprefix("torch."): dtype for dtype in (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)}  # fmt: skip


class DistributedMemory:
    """Memory of several GPUs (or, without them, of several processes of this host) as one.

    In a process that a launcher made a rank (torchrun, ``memfit launch``), this is that rank's part, and
    every rank makes the same calls in the same order. Anywhere else it starts ``num_gpus`` worker processes,
    which live until `close`, the end of the ``with`` block, or the end of this process.

    Args:
        num_gpus: how many ranks; those of the launcher unless given.
        limit: the most that each rank may hold, as ``"2GB"`` or bytes, or a list with one a rank; what the
            device has free unless given.

    Raises:
        UsageError: ``num_gpus`` is not the launcher's number of ranks, or ranks give different ones.
        ToolFailure: a worker did not start, or died later (which ends the others too).

    Examples:
        >>> with DistributedMemory(num_gpus=2, limit="64MiB") as memory:     # doctest: +SKIP
        ...     block = memory.allocate(size="20MiB")
        ...     memory.synchronize().allocated_bytes
        20971520
    """

    def __init__(
        self, num_gpus: int | None = None, *, limit: str | int | Sequence[str | int] | None = None
    ) -> None:
        self._workers: Workers | None = None
        self._own: RankMemory | None = None
        self._closed = False
        led = not (groups.in_group() or groups.under_torchrun())
        count = _count(num_gpus, led=led)
        limits = _limits(limit, count)
        if led:
            self._workers = Workers(count)
            self._call(_set_limit, limits)
        else:
            groups.check_same((count, limits), "num_gpus and limit")
            self._own = RankMemory(limits[groups.rank()])
        self.num_gpus = count

    def allocate(
        self,
        size: str | int | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | torch.dtype = "uint8",
        split: Split = "even",
        name: str | None = None,
    ) -> ShardedBlock:
        """A block over all ranks, not initialised.

        Args:
            size: of the whole: ``"2GB"`` or bytes. Or:
            shape: of the whole as a tensor; dimension 0 is cut.
            dtype: of its elements.
            split: ``"even"``: equal shards; ``"by_free"``: in proportion to what each rank has free; or the
                rows of each rank.
            name: for messages.

        Raises:
            UsageError: a size, type or split that cannot be meant.
            OutOfDistributedMemory: a rank has not enough free; says which. No rank then keeps a shard.
        """
        kind = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
        if (size is None) == (shape is None):
            raise UsageError("allocate() takes a size (of bytes) or a shape: allocate(size='2GB')")
        if size is not None:
            wanted = parse_bytes(size, what="allocate(size)")
            shape = (wanted // kind.itemsize,)
        whole = tuple(int(length) for length in shape or ())
        if not whole or any(length < 0 for length in whole) or not math.prod(whole):
            raise UsageError(f"allocate(shape={shape!r}): a block has at least one dimension and one element")
        result: ShardedBlock = self._one(RankMemory.allocate, whole, kind, split, name)
        return result

    def deallocate(self, block: ShardedBlock) -> None:
        """Give a block back on all ranks. Raises UsageError where that was done already."""
        self._call(RankMemory.deallocate, block)

    def synchronize(self) -> MemoryStatistics:
        """Wait until all devices and ranks have done what they were told; their memory then.

        Raises:
            UsageError: the ranks do not have the same blocks.
        """
        result: MemoryStatistics = self._one(RankMemory.synchronize)
        return result

    def statistics(self) -> MemoryStatistics:
        """The memory of every rank, and of all."""
        result: MemoryStatistics = self._one(RankMemory.statistics)
        return result

    def rebalance(self) -> Rebalanced:
        """Cut all blocks anew, so that every rank has the same share of its memory in use; values move along.

        Where the shards lie then, `block` says; DTensors of before look at the old memory.
        """
        result: Rebalanced = self._one(RankMemory.rebalance)
        return result

    def block(self, block: ShardedBlock) -> ShardedBlock:
        """The block as it lies now."""
        result: ShardedBlock = self._one(RankMemory.block, block)
        return result

    def write(self, block: ShardedBlock, values: torch.Tensor) -> None:
        """Fill a block with the whole of a tensor; every rank takes its rows (and must give the same)."""
        self._call(RankMemory.write, block, values)

    def read(self, block: ShardedBlock) -> torch.Tensor:
        """The whole of a block, on the CPU."""
        result: torch.Tensor = self._one(RankMemory.read, block)
        return result

    def run(self, function: Callable[..., Any], *blocks: ShardedBlock) -> list[Any]:
        """``function`` on every rank with its shards of ``blocks``; what it gave, by rank.

        Raises:
            ToolFailure: it raised; says on which rank, and what.
        """
        result: list[Any] = self._one(RankMemory.run, function, blocks)
        return result

    def local(self, block: ShardedBlock) -> torch.Tensor:
        """This rank's shard, the memory itself; only in a process that is a rank."""
        return self._rank("local").local(block)

    def dtensor(self, block: ShardedBlock) -> Any:
        """The block as a ``DTensor`` on the same memory; only in a process that is a rank."""
        return self._rank("dtensor").dtensor(block)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes, by rank; empty under a launcher."""
        return self._workers.pids if self._workers else ()

    def close(self) -> None:
        """Give all blocks back and end the workers. May be called twice."""
        self._closed = True
        self._own = None
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> DistributedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rank(self, what: str) -> RankMemory:
        if self._own is None and not self._closed:
            raise UsageError(
                f"{what}() is for a process that is a rank; this one leads workers: use run(function, "
                "block), read and write"
            )
        return self._open()

    def _open(self) -> RankMemory:
        if self._own is None:
            raise UsageError("this DistributedMemory is closed: make a new one")
        return self._own

    def _call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self._closed and self._workers is not None:
            raise UsageError("this DistributedMemory is closed: make a new one")
        if self._workers is not None:
            return self._workers.call(function, *arguments)
        return [function(self._open(), *arguments)]

    def _one(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What rank 0 (or this rank) gave: all ranks give the same."""
        return self._call(function, *arguments)[0]


def _set_limit(memory: RankMemory, limits: Sequence[int | None]) -> None:
    memory.limit_bytes = limits[groups.rank()]


def _count(num_gpus: int | None, *, led: bool) -> int:
    if num_gpus is not None and (isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1):
        raise UsageError(f"num_gpus must be a number of 1 or more, not {num_gpus!r}")
    if led:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_gpus is None and not found:
            raise UsageError("no GPU here to count: DistributedMemory(num_gpus=2) starts two processes")
        return num_gpus or found
    groups.join()
    ranks = groups.world_size()
    if num_gpus not in (None, ranks):
        raise UsageError(
            f"num_gpus={num_gpus}, but the launcher started {ranks} ranks: leave num_gpus out, or launch "
            f"{num_gpus}"
        )
    return ranks


def _limits(limit: str | int | Sequence[str | int] | None, count: int) -> list[int | None]:
    if limit is None:
        return [None] * count
    if isinstance(limit, str | int):
        return [parse_bytes(limit, what="limit")] * count
    if len(limit) != count:
        raise UsageError(f"limit has {len(limit)} entries for {count} ranks: give one size, or one a rank")
    return [parse_bytes(one, what="limit") for one in limit]
