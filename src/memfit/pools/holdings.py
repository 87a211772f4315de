"""The pool's books: who holds which block, since where; and what is said when there is no room."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.allocators.base import Block, OutOfMemory
from memfit.core.units import format_bytes
from memfit.pools.handles import Lease
from memfit.pools.sites import Site

if TYPE_CHECKING:
    from memfit.pools.chunks import Chunk

_HOLDERS_SHOWN = 5


class Holding:
    """One block that is out: where it lies now, who asked for it, and whether its handle is freed."""

    __slots__ = (
        "asked_bytes",
        "block",
        "chunk",
        "freed_at",
        "key",
        "lease",
        "offset_bytes",
        "requested_bytes",
        "site",
        "size_bytes",
        "streams",
    )

    def __init__(
        self, key: int, chunk: Chunk, block: Block, requested_bytes: int, asked_bytes: int, site: Site
    ) -> None:
        self.key = key
        self.requested_bytes = requested_bytes
        self.asked_bytes = asked_bytes  # of the policy: whole units of alignment
        self.site = site
        self.freed_at: Site | None = None
        self.streams: list[Any] | None = None
        self.lease: weakref.ref[Lease] | None = None
        self.chunk = chunk
        self.block = block
        self.offset_bytes = block.offset_bytes
        self.size_bytes = block.size_bytes

    def move_to(self, chunk: Chunk, block: Block) -> None:
        """The block is another one from now on."""
        self.chunk = chunk
        self.block = block
        self.offset_bytes = block.offset_bytes
        self.size_bytes = block.size_bytes

    @property
    def address(self) -> int:
        return self.chunk.memory.address + self.offset_bytes

    def pinned(self) -> bool:
        """Whether it must stay where it is: a tensor looks into it, or its lease is just ending."""
        lease = self.lease() if self.lease is not None else None
        return lease is None or lease.pinned()


class LeaseEnd(weakref.ref[Lease]):
    """A weak reference that still knows, when its lease has died, which holding that was of."""

    __slots__ = ("holding",)
    holding: Holding


class Ended:
    """Holdings whose lease has died and whose block is not yet taken back.

    Leases die wherever Python drops the last reference, in the garbage collector too and so in the middle of
    the pool's own work: then nothing may be done but to note it (`deque.append` is atomic).
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self.noted: deque[Holding] = deque()
        self._settle = weakref.WeakMethod(settle)

    def watch(self, holding: Holding, lease: Lease) -> None:
        """Note the holding when its lease dies, and have the pool take the block back if it is at rest."""
        end = LeaseEnd(lease, self._on_end)
        end.holding = holding
        holding.lease = end

    def _on_end(self, end: weakref.ref[Lease]) -> None:
        assert isinstance(end, LeaseEnd)
        self.noted.append(end.holding)
        if (settle := self._settle()) is not None:
            settle()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What one line of code holds of a pool.

    Attributes:
        site: the line that asked for the blocks.
        blocks, requested_bytes: how many, and what was asked for.
        only_tensors: of these blocks, those that were deallocated and that tensors still look into.
    """

    site: Site
    blocks: int
    requested_bytes: int
    only_tensors: int

    def __str__(self) -> str:
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        kept = f" ({self.only_tensors} deallocated, kept by tensors)" if self.only_tensors else ""
        return f"{format_bytes(self.requested_bytes)} in {blocks} from {self.site}{kept}"


def holders_of(holdings: Iterable[Holding]) -> tuple[Holder, ...]:
    """Who holds what, most bytes first."""
    counts: Counter[Site] = Counter()
    sizes: Counter[Site] = Counter()
    kept: Counter[Site] = Counter()
    for holding in holdings:
        counts[holding.site] += 1
        sizes[holding.site] += holding.requested_bytes
        kept[holding.site] += holding.freed_at is not None
    return tuple(
        Holder(site=site, blocks=counts[site], requested_bytes=size, only_tensors=kept[site])
        for site, size in sizes.most_common()
    )


class OutOfPoolMemory(OutOfMemory):
    """No room for an allocation, in a pool or on its device; says what is free and who holds the rest.

    Attributes:
        requested_bytes, reserved_bytes, limit_bytes, allocated_bytes: as in `OutOfMemory`; ``limit_bytes`` is
            ``reserved_bytes`` where the device and not a limit refused.
        free_bytes, largest_free_bytes: what is free below the limit, and the longest piece of it.
        holders: who holds the rest, most bytes first.
    """

    def __init__(
        self,
        *,
        requested_bytes: int,
        reserved_bytes: int,
        limit_bytes: int | None,
        allocated_bytes: int,
        largest_free_bytes: int,
        holders: tuple[Holder, ...],
        where: str,
    ) -> None:
        super().__init__(
            requested_bytes=requested_bytes,
            reserved_bytes=reserved_bytes,
            limit_bytes=reserved_bytes if limit_bytes is None else limit_bytes,
            allocated_bytes=allocated_bytes,
        )
        self.free_bytes = self.limit_bytes - allocated_bytes
        self.largest_free_bytes: int = largest_free_bytes
        self.holders = holders
        refusal = (
            "the device has no more" if limit_bytes is None else f"of a limit of {format_bytes(limit_bytes)}"
        )
        free = (
            f"{refusal}, {format_bytes(self.free_bytes)} is free"
            f" (largest piece {format_bytes(largest_free_bytes)})"
        )
        self.args = (
            f"out of memory on {where}: {format_bytes(requested_bytes)} asked for; {free}. {self._held()}",
        )

    def _held(self) -> str:
        if not self.holders and self.largest_free_bytes >= self.requested_bytes:
            return "Nothing is held, but the policy needs more than that to place it; raise the limit"
        if not self.holders:
            return "Nothing is held: the request is larger than the memory; ask for less or raise the limit"
        shown = "; ".join(str(holder) for holder in self.holders[:_HOLDERS_SHOWN])
        rest = len(self.holders) - _HOLDERS_SHOWN
        more = f"; and {rest} more lines" if rest > 0 else ""
        return f"Held: {shown}{more}. Free some of these or raise the limit"
