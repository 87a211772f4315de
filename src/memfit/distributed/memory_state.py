"""What distributed memory counts, as values that print well; and the error that says which rank is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.errors import MemfitError
from memfit.core.units import format_bytes
from memfit.distributed.balance import Balance


class OutOfDistributedMemory(MemfitError):
    """A block does not fit; the message says what each rank needs and has free."""


@dataclass(frozen=True, kw_only=True)
class RankStatistics:
    """One rank's memory.

    Attributes:
        rank: its number.
        device: where its shards lie.
        allocated_bytes: of shards that are out.
        peak_bytes: the most that they ever were.
        free_bytes: what it can still take.
        blocks: how many blocks have a shard here.
    """

    rank: int
    device: str
    allocated_bytes: int
    peak_bytes: int
    free_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class MemoryStatistics:
    """All ranks' memory at one moment."""

    ranks: tuple[RankStatistics, ...]

    @property
    def allocated_bytes(self) -> int:
        """Of all ranks."""
        return sum(one.allocated_bytes for one in self.ranks)

    @property
    def free_bytes(self) -> int:
        """Of all ranks."""
        return sum(one.free_bytes for one in self.ranks)

    @property
    def balance(self) -> Balance:
        """How evenly the shards lie."""
        return Balance(
            names=tuple(f"rank {one.rank}" for one in self.ranks),
            seconds=(0.0,) * len(self.ranks),
            memory_bytes=tuple(one.allocated_bytes for one in self.ranks),
            limits_bytes=tuple(one.allocated_bytes + one.free_bytes for one in self.ranks),
        )

    def __str__(self) -> str:
        lines = [
            f"rank {one.rank} on {one.device}: {format_bytes(one.allocated_bytes)} in {one.blocks} blocks, "
            f"{format_bytes(one.free_bytes)} free, peak {format_bytes(one.peak_bytes)}"
            for one in self.ranks
        ]
        total = f"all: {format_bytes(self.allocated_bytes)}, {format_bytes(self.free_bytes)} free"
        return "\n".join([*lines, total])


@dataclass(frozen=True, kw_only=True)
class Rebalanced:
    """What a rebalancing did: memory before and after, and the bytes that went to another rank."""

    before: MemoryStatistics
    after: MemoryStatistics
    moved_bytes: int


def too_large(what: str, needed_bytes: Sequence[int], free_bytes: Sequence[int]) -> OutOfDistributedMemory:
    """The error for a block that some ranks cannot take their shard of."""
    full = [rank for rank, need in enumerate(needed_bytes) if need > free_bytes[rank]]
    told = ", ".join(
        f"rank {rank} needs {format_bytes(needed_bytes[rank])} and has {format_bytes(free_bytes[rank])} free"
        for rank in full[:8]
    )
    more = f" and {len(full) - 8} more ranks" if len(full) > 8 else ""
    enough = sum(free_bytes) >= sum(needed_bytes)
    remedy = "cut it by what is free: split='by_free'" if enough else "deallocate blocks, or take more ranks"
    return OutOfDistributedMemory(
        f"{what} does not fit: {told}{more} ({format_bytes(sum(free_bytes))} free on all); {remedy}"
    )
