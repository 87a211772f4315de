"""What a pool counts, as a value that prints well."""

# ruff: noqa: PLR1730  -- max() costs three times the comparison, and every allocation comes by here

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.units import format_bytes


@dataclass(slots=True)
class Counts:
    """The running totals of a pool."""

    requested_bytes: int = 0
    allocated_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    allocations: int = 0
    frees: int = 0
    automatic_frees: int = 0
    failures: int = 0
    moves: int = 0

    def took(self, requested_bytes: int, size_bytes: int) -> None:
        """A block went out."""
        self.allocations += 1
        self.requested_bytes += requested_bytes
        self.allocated_bytes += size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def gave_back(self, requested_bytes: int, size_bytes: int) -> None:
        """A block came back."""
        self.frees += 1
        self.requested_bytes -= requested_bytes
        self.allocated_bytes -= size_bytes


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """One moment of a pool; all sizes in bytes.

    Attributes:
        name, device, policy: of the pool.
        limit_bytes: the most it may reserve; None: what the device has.
        reserved_bytes: real memory that it has taken, in ``chunks`` pieces.
        allocated_bytes: of that, in blocks that are out; ``requested_bytes`` of it were asked for.
        waiting_bytes: of the allocated ones, deallocated while tensors still look into them.
        largest_free_bytes: the longest free piece of reserved memory.
        blocks: blocks that are out; ``pinned_blocks`` of them have tensors that look into them.
        allocations, frees, automatic_frees: since the pool was made; the last are the frees of blocks that
            nobody deallocated and nobody could reach any more.
        failures: allocations that found no room.
        chunks_added, chunks_dropped, moves: how often the pool grew, gave back, and moved a block.
    """

    name: str
    device: str
    policy: str
    limit_bytes: int | None
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    waiting_bytes: int
    largest_free_bytes: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    chunks: int
    blocks: int
    pinned_blocks: int
    allocations: int
    frees: int
    automatic_frees: int
    failures: int
    chunks_added: int
    chunks_dropped: int
    moves: int

    @property
    def free_bytes(self) -> int:
        """What may still be allocated: below the limit, else in reserved memory."""
        ceiling = self.reserved_bytes if self.limit_bytes is None else self.limit_bytes
        return ceiling - self.allocated_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free reserved bytes outside of the longest free piece: 0 is one piece."""
        free = self.reserved_bytes - self.allocated_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    @property
    def padding(self) -> float:
        """Share of the allocated bytes that nobody asked for."""
        return 1 - self.requested_bytes / self.allocated_bytes if self.allocated_bytes else 0.0

    def __str__(self) -> str:
        limit = "what the device has" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        waiting = f", {format_bytes(self.waiting_bytes)} wait for tensors" if self.waiting_bytes else ""
        rows = (
            ("limit", limit),
            ("reserved", f"{format_bytes(self.reserved_bytes)} in {_counted(self.chunks, 'chunk')}"),
            (
                "allocated",
                f"{format_bytes(self.allocated_bytes)} in {_counted(self.blocks, 'block')}{waiting}",
            ),
            ("asked for", f"{format_bytes(self.requested_bytes)} ({self.padding:.1%} padding)"),
            (
                "largest free",
                f"{format_bytes(self.largest_free_bytes)} ({self.fragmentation:.1%} fragmented)",
            ),
            (
                "peaks",
                f"{format_bytes(self.peak_reserved_bytes)} reserved,"
                f" {format_bytes(self.peak_allocated_bytes)} allocated,"
                f" {format_bytes(self.peak_requested_bytes)} asked for",
            ),
            (
                "traffic",
                f"{self.allocations} allocations, {self.frees} frees ({self.automatic_frees} automatic)",
            ),
            (
                "events",
                f"{self.failures} failures, {_counted(self.chunks_added, 'chunk')} added,"
                f" {self.chunks_dropped} dropped, {_counted(self.moves, 'block')} moved",
            ),
        )
        head = f"{self.name} on {self.device}, {self.policy}"
        return "\n".join([head, *(f"  {label:<13} {text}" for label, text in rows)])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
