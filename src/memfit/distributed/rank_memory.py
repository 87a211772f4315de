"""One rank's part of distributed memory. All its methods but `local` are collective: every rank calls
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.errors import ToolFailure, UsageError
from memfit.core.units import format_bytes
from memfit.distributed.groups import exchanged, in_group, own_device, rank, world_size
from memfit.distributed.memory_state import MemoryStatistics, RankStatistics, Rebalanced, too_large
from memfit.distributed.sharding import ShardedBlock, Split, moved, proportional_rows, row_bytes_of, rows_of

HOST_SHARE = 0.9
"""The share of the host's available memory that ranks on the CPU take together at most."""


class RankMemory:
    """The shards of one rank.

    Args:
        limit_bytes: the most that this rank's shards may hold together; None: what the device has.
        device: where they lie; this rank's GPU, or the CPU, if not given.
    """

    def __init__(self, limit_bytes: int | None = None, device: torch.device | None = None) -> None:
        self.device = device or own_device()
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._shards: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, ShardedBlock] = {}
        self._next = 0

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, split: Split, name: str | None
    ) -> ShardedBlock:
        """A new block; every rank has its rows, not initialised.

        Raises:
            OutOfDistributedMemory: a rank cannot take its shard; then no rank keeps one.
        """
        free = [int(one) for one in exchanged(self.free_bytes)]
        block = ShardedBlock(
            id=self._next,
            name=name or f"block {self._next}",
            shape=tuple(shape),
            dtype=dtype,
            rows=rows_of(split, shape[0], free),
            row_bytes=row_bytes_of(shape, dtype),
        )
        what = f"{block.name} of {format_bytes(block.size_bytes)}"
        if any(need > free[number] for number, need in enumerate(block.shard_bytes)):
            raise too_large(what, block.shard_bytes, free)
        shard, failure = self._take(block)
        failures = exchanged(failure)
        if any(failures):
            told = "; ".join(f"rank {number}: {text}" for number, text in enumerate(failures) if text)
            left = [0 if text else room for text, room in zip(failures, free, strict=True)]
            raise too_large(f"{what} ({told})", block.shard_bytes, left)
        assert shard is not None
        self._next += 1
        self._keep(block, shard)
        return block

    def _take(self, block: ShardedBlock) -> tuple[torch.Tensor | None, str | None]:
        try:
            return torch.empty(block.shard_shape(rank()), dtype=block.dtype, device=self.device), None
        except RuntimeError as error:  # out of memory: torch's own class on CUDA, a plain one on the CPU
            return None, str(error).split("\n", maxsplit=1)[0]

    def _keep(self, block: ShardedBlock, shard: torch.Tensor) -> None:
        self._blocks[block.id], self._shards[block.id] = block, shard
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def deallocate(self, block: ShardedBlock) -> None:
        """Gives a block back. Raises UsageError where it has been given back already."""
        self.block(block)
        del self._blocks[block.id], self._shards[block.id]

    def block(self, block: ShardedBlock) -> ShardedBlock:
        """The block as it lies now; after a rebalancing other rows belong to each rank."""
        if not isinstance(block, ShardedBlock):
            raise UsageError(f"{block!r} is no block of distributed memory: give what allocate() gave")
        known = self._blocks.get(block.id)
        if known is None or known.shape != block.shape:
            raise UsageError(f"{block.name} has been deallocated already, or is another memory's")
        return known

    def local(self, block: ShardedBlock) -> torch.Tensor:
        """This rank's rows: the memory itself, no copy."""
        return self._shards[self.block(block).id]

    @property
    def allocated_bytes(self) -> int:
        """Of this rank's shards."""
        return sum(block.shard_bytes[rank()] for block in self._blocks.values())

    @property
    def free_bytes(self) -> int:
        """What this rank can still take: below its limit, and of what its device has."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            there = free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            import psutil

            there = int(psutil.virtual_memory().available * HOST_SHARE) // world_size()
        below = there if self.limit_bytes is None else self.limit_bytes - self.allocated_bytes
        return max(0, min(there, below))

    def statistics(self) -> MemoryStatistics:
        """All ranks' memory now."""
        own = RankStatistics(
            rank=rank(),
            device=str(self.device),
            allocated_bytes=self.allocated_bytes,
            peak_bytes=self.peak_bytes,
            free_bytes=self.free_bytes,
            blocks=len(self._blocks),
        )
        return MemoryStatistics(ranks=tuple(exchanged(own)))

    def synchronize(self) -> MemoryStatistics:
        """Waits for this device's kernels and for all ranks; their memory then.

        Raises:
            UsageError: the ranks do not have the same blocks (one allocated or deallocated alone).
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        held = exchanged(sorted((block.id, block.name, block.rows) for block in self._blocks.values()))
        for number, other in enumerate(held):
            if other != held[0]:
                odd = sorted({name for _, name, _ in set(map(tuple, other)) ^ set(map(tuple, held[0]))})
                raise UsageError(
                    f"ranks 0 and {number} do not have the same blocks ({', '.join(odd)}): every rank must "
                    "call allocate, deallocate and rebalance, in the same order"
                )
        return self.statistics()

    def rebalance(self) -> Rebalanced:
        """Cuts all blocks anew, so that every rank has the same share of its memory in use.

        A block whose new shard does not fit beside the old ones stays as it is.
        """
        before = self.statistics()
        room = [one.allocated_bytes + one.free_bytes for one in before.ranks]
        moved_bytes = 0
        for block in sorted(self._blocks.values(), key=lambda block: (-block.size_bytes, block.id)):
            rows = proportional_rows(block.shape[0], room)
            free = [int(one) for one in exchanged(self.free_bytes)]
            if rows == block.rows or any(
                row * block.row_bytes > free[number] for number, row in enumerate(rows)
            ):
                continue
            moved_bytes += self._cut_anew(block, rows)
        return Rebalanced(before=before, after=self.statistics(), moved_bytes=moved_bytes)

    def _cut_anew(self, block: ShardedBlock, rows: tuple[int, ...]) -> int:
        shard = moved(self._shards[block.id], block.rows, rows)
        changed = ShardedBlock(**{**vars(block), "rows": rows})
        self._keep(changed, shard)
        stayed = sum(
            max(
                0,
                min(block.first_row(n) + block.rows[n], changed.first_row(n) + rows[n])
                - max(block.first_row(n), changed.first_row(n)),
            )
            for n in range(len(rows))
        )
        return (block.shape[0] - stayed) * block.row_bytes

    def dtensor(self, block: ShardedBlock) -> Any:
        """The block as a DTensor over all ranks, on the same memory.

        Raises:
            UsageError: there is no process group, or the block is not cut evenly (DTensor knows no other
            cut).
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        known = self.block(block)
        if not in_group():
            raise UsageError("a DTensor needs a process group: run under torchrun, or use memory.run(...)")
        if known.rows != rows_of("even", known.shape[0], [0] * world_size()):
            raise UsageError(
                f"{known.name} is cut into {list(known.rows)} rows; a DTensor needs equal shards "
                "(split='even', and no rebalance after it)"
            )
        mesh = init_device_mesh(self.device.type, (world_size(),))
        stride = torch.empty(known.shape, device="meta").stride()
        return DTensor.from_local(
            self.local(known), mesh, [Shard(0)], run_check=False, shape=torch.Size(known.shape), stride=stride
        )

    def write(self, block: ShardedBlock, whole: torch.Tensor) -> None:
        """Copies this rank's rows out of the whole, which every rank gives."""
        known = self.block(block)
        if tuple(whole.shape) != known.shape or whole.dtype != known.dtype:
            raise UsageError(
                f"{known.name} is {known.dtype} {list(known.shape)}, not {whole.dtype} {list(whole.shape)}"
            )
        first = known.first_row(rank())
        self.local(known).copy_(whole[first : first + known.rows[rank()]])

    def read(self, block: ShardedBlock) -> torch.Tensor:
        """The whole block on the CPU of every rank."""
        known = self.block(block)
        own = self.local(known).cpu()
        if not in_group():
            return own.clone()
        longest = max(known.rows)
        padded = torch.zeros((longest, *known.shape[1:]), dtype=known.dtype, device=self.device)
        padded[: len(own)] = own
        pieces = [torch.empty_like(padded) for _ in known.rows]
        dist.all_gather(pieces, padded)
        return torch.cat([piece[:rows] for piece, rows in zip(pieces, known.rows, strict=True)]).cpu()

    def run(self, function: Callable[..., Any], blocks: Sequence[ShardedBlock]) -> list[Any]:
        """``function(*local tensors)`` on every rank; the results by rank.

        Raises:
            ToolFailure: it raised on some ranks; on all of them, so that none waits for another.
        """
        failure, result = None, None
        try:
            result = function(*(self.local(block) for block in blocks))
        except Exception as error:  # whatever the user's function raises
            failure = f"{type(error).__name__}: {error}"
        failures = exchanged(failure)
        if any(failures):
            told = "; ".join(f"rank {number}: {text}" for number, text in enumerate(failures) if text)
            raise ToolFailure(f"the function failed on {told}")
        return exchanged(result)
