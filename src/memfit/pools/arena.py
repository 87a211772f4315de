"""The inside of a pool: chunks, the blocks that are out, growth up to a limit. Its owner holds the lock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from memfit.allocators.base import Block
from memfit.allocators.caching import CachingAllocator
from memfit.pools.chunks import Chunk, Chunks, Space
from memfit.pools.compaction import Defragmentation, compact, largest_free_bytes
from memfit.pools.handles import Lease
from memfit.pools.holdings import Ended, Holding, OutOfPoolMemory, holders_of
from memfit.pools.memory import NoSystemMemory
from memfit.pools.plans import PlannedPolicy, Recorder
from memfit.pools.poison import Poison
from memfit.pools.policies import Policy
from memfit.pools.reuse import FreedBlocks
from memfit.pools.segments import Segments
from memfit.pools.sites import Site
from memfit.pools.statistics import Counts, PoolStatistics
from memfit.pools.streams import InFlight


class Arena:
    """Blocks in chunks of real memory.

    Args:
        name: for messages.
        device: where the memory is.
        policy: places the blocks.
        alignment_bytes: of every block.
        chunk_bytes: the least that is taken from the device at once.
        max_bytes: the most that is ever taken, or None.
        ended: where leases that died are noted.
        poison: keeps a pattern in free memory, or None.
    """

    def __init__(
        self,
        *,
        name: str,
        device: torch.device,
        policy: Policy,
        alignment_bytes: int,
        chunk_bytes: int,
        max_bytes: int | None,
        ended: Ended,
        poison: Poison | None,
    ) -> None:
        self.name = name
        self.device = device
        self.alignment_bytes = alignment_bytes
        self.chunk_bytes = chunk_bytes
        self.max_bytes = max_bytes
        self.counts = Counts()
        self.live: dict[int, Holding] = {}
        self.chunks = _space(policy, device, self._on_new_chunk, alignment_bytes, max_bytes)
        self._ended = ended
        self._in_flight = InFlight()
        self._freed = FreedBlocks(on=FreedBlocks.serve(policy))
        self._poison = poison
        self._next_key = 0
        self._plans = 0  # that are served; a plan comes before blocks that were freed
        self.recorder: Recorder | None = None

    # Blocks.

    def take(self, requested_bytes: int, site: Site) -> Lease:
        """A lease of a block of at least ``requested_bytes``.

        Raises:
            OutOfPoolMemory: not even after all that could be done for room.
        """
        self.take_back_ended()
        alignment = self.alignment_bytes
        asked = -(-requested_bytes // alignment) * alignment or alignment
        freed = self._freed.take(asked)
        chunk, block = (freed.chunk, freed.block) if freed else self._placed(asked, requested_bytes)
        if self._poison is not None:
            self._poison.check(chunk.memory, block.offset_bytes, block.size_bytes)
        key = self._next_key
        self._next_key = key + 1
        holding = self.live[key] = Holding(key, chunk, block, requested_bytes, asked, site)
        self.counts.took(requested_bytes, holding.size_bytes)
        if self.recorder is not None:
            self.recorder.took(key, asked)
        lease = Lease(holding)
        self._ended.watch(holding, lease)
        return lease

    def take_back_ended(self) -> None:
        """Take back the blocks whose lease has died, but for those that other streams still use."""
        noted = self._ended.noted
        while noted:
            holding = noted.popleft()
            if holding.streams:
                self._in_flight.add(holding, holding.streams)
            else:
                self._give_back(holding)
        if self._in_flight:
            for holding in self._in_flight.take_done():
                self._give_back(holding)

    def settle(self) -> None:
        """The same, and the policy has all back that is free: what is left is what is out."""
        self.take_back_ended()
        self._freed.give_back()

    def whole_units(self, size_bytes: int) -> int:
        """A size rounded up to whole units of alignment."""
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    # Chunks.

    def grow(self, size_bytes: int, *, touch: bool = False) -> Chunk:
        """Take a chunk from the device.

        Raises:
            NoSystemMemory: it has none.
        """
        return self.chunks.add(size_bytes, touch=touch)

    def serve(self, policy: PlannedPolicy) -> Chunk:
        """Take a chunk whose places are planned.

        Raises:
            OutOfPoolMemory: past the limit, or more than the device has.
        """
        size_bytes = self.whole_units(max(policy.total_bytes, 1))
        room = self.room_bytes()
        if room is not None and room < size_bytes:
            self.chunks.drop_empty(until_bytes=size_bytes - room)
            room = self.room_bytes()
        if room is not None and room < size_bytes:
            raise self.out_of_memory(size_bytes)
        try:
            chunk = self.chunks.add_planned(policy, size_bytes)
        except NoSystemMemory as error:
            raise self.out_of_memory(size_bytes) from error
        self._plans += 1
        return chunk

    def end_plan(self, chunk: Chunk) -> None:
        """A chunk that `serve` took is as any other from now on."""
        self._plans -= chunk.kept
        chunk.kept = False

    def defragment(self) -> Defragmentation:
        """Move blocks together that no tensor looks into."""
        before = self.largest_free_bytes()
        pinned = sum(holding.pinned() for holding in self.live.values())
        blocks, moved_bytes = compact(self.chunks, self.live.values())
        if self._poison is not None:
            self._poison.spread_around(self.chunks, self.live.values())
        self.counts.moves += blocks
        # Blocks may have other sizes now, where the policy's rounding depends on the place.
        self.counts.allocated_bytes = sum(holding.size_bytes for holding in self.live.values())
        return Defragmentation(
            moved_blocks=blocks,
            moved_bytes=moved_bytes,
            pinned_blocks=pinned,
            largest_free_before_bytes=before,
            largest_free_after_bytes=self.largest_free_bytes(),
        )

    def close(self) -> None:
        """Forget everything; memory that tensors look into lives as long as they do."""
        self.live.clear()
        self._freed.forget()
        self.chunks.clear()
        self.counts.requested_bytes = self.counts.allocated_bytes = 0

    # Figures.

    def largest_free_bytes(self) -> int:
        """The longest free piece of reserved memory."""
        return largest_free_bytes(self.chunks, self.live.values())

    def room_bytes(self) -> int | None:
        """What may still be taken from the device below the limit; None: there is no limit."""
        return None if self.max_bytes is None else self.max_bytes - self.chunks.reserved_bytes

    def statistics(self) -> PoolStatistics:
        """All figures, now."""
        counts, holdings = self.counts, self.live.values()
        return PoolStatistics(
            name=self.name,
            device=str(self.device),
            policy=self.chunks.policy.name,
            limit_bytes=self.max_bytes,
            reserved_bytes=self.chunks.reserved_bytes,
            allocated_bytes=counts.allocated_bytes,
            requested_bytes=counts.requested_bytes,
            waiting_bytes=sum(holding.size_bytes for holding in holdings if holding.freed_at),
            largest_free_bytes=self.largest_free_bytes(),
            peak_requested_bytes=counts.peak_requested_bytes,
            peak_allocated_bytes=counts.peak_allocated_bytes,
            peak_reserved_bytes=self.chunks.peak_reserved_bytes,
            chunks=len(self.chunks),
            blocks=len(holdings),
            pinned_blocks=sum(holding.pinned() for holding in holdings),
            allocations=counts.allocations,
            frees=counts.frees,
            automatic_frees=counts.automatic_frees,
            failures=counts.failures,
            chunks_added=self.chunks.added,
            chunks_dropped=self.chunks.dropped,
            moves=counts.moves,
        )

    def out_of_memory(self, requested_bytes: int) -> OutOfPoolMemory:
        """The error that says what is free and who holds the rest."""
        room = self.room_bytes()
        limited = room is not None and room < self.whole_units(requested_bytes)
        return OutOfPoolMemory(
            requested_bytes=requested_bytes,
            reserved_bytes=self.chunks.reserved_bytes,
            limit_bytes=self.max_bytes if limited else None,
            allocated_bytes=self.counts.allocated_bytes,
            largest_free_bytes=max(self.largest_free_bytes(), room or 0),
            holders=holders_of(self.live.values()),
            where=f"{self.device} ({self.name})",
        )

    def _give_back(self, holding: Holding) -> None:
        if self.live.pop(holding.key, None) is None:
            return  # the pool was closed meanwhile
        if self._poison is not None:
            self._poison.freed(holding)
        if self._plans or not self._freed.keep(holding):
            holding.chunk.give_back(holding.block)
        self.counts.gave_back(holding.requested_bytes, holding.size_bytes)
        if self.recorder is not None:
            self.recorder.gave_back(holding.key)
        if holding.freed_at is None:
            self.counts.automatic_frees += 1

    def _placed(self, asked_bytes: int, requested_bytes: int) -> tuple[Chunk, Block]:
        """A block by the policy.

        Raises:
            OutOfPoolMemory: not even after all that could be done for room.
        """
        placed = self.chunks.place(asked_bytes) or self._make_room(asked_bytes)
        if placed is None:
            self.counts.failures += 1
            raise self.out_of_memory(requested_bytes)
        return placed

    def _on_new_chunk(self, chunk: Chunk) -> None:
        if self._poison is not None:
            self._poison.spread(chunk.memory, 0, chunk.size_bytes)

    def _make_room(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """What can be done for a block that no chunk has room for, the cheap things first."""
        if self._freed.give_back():
            placed = self.chunks.place(size_bytes)
            if placed is not None:
                return placed
        for ways in (self._grow_for, self._exchange_for, self._collect_for, self._compact_for):
            placed = ways(size_bytes)
            if placed is not None:
                return placed
        return None

    def _grow_for(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """A new chunk: of the usual size, else of the least that the policy can place the block in."""
        for chunk_bytes in self._sizes_to_try(size_bytes):
            try:
                chunk = self.grow(chunk_bytes)
            except NoSystemMemory:
                continue
            block = chunk.place(size_bytes)
            if block is not None:
                return chunk, block
            self.chunks.remove(chunk)
        return None

    def _sizes_to_try(self, size_bytes: int) -> Iterator[int]:
        room = self.room_bytes()
        if room is not None:
            room -= room % self.alignment_bytes
            if room < size_bytes:
                return
        power = 1 << (size_bytes - 1).bit_length()  # buddies place a block in such a space only
        tried: set[int] = set()
        for wanted in (max(self.chunk_bytes, size_bytes), size_bytes, power, 2 * power, room or 0):
            chosen = wanted if room is None else min(wanted, room)
            if chosen >= size_bytes and chosen not in tried:
                tried.add(chosen)
                yield chosen

    def _exchange_for(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """Give empty chunks back, for one of the size that is needed."""
        room = self.room_bytes()
        missing = size_bytes if room is None else size_bytes - room
        empty = self.chunks.empty_bytes()
        if not empty or (room is not None and empty < missing):
            return None
        self.chunks.drop_empty(until_bytes=missing)
        placed = self._grow_for(size_bytes)
        if placed is None and self.chunks.drop_empty():  # some policies need more than the size of a block
            placed = self._grow_for(size_bytes)
        return placed

    def _collect_for(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """Have cycles collected that may hold handles."""
        if gc.isenabled():
            gc.collect()
        before = self.counts.frees
        self.settle()
        if self.counts.frees == before:
            return None
        return self.chunks.place(size_bytes) or self._exchange_for(size_bytes)

    def _compact_for(self, size_bytes: int) -> tuple[Chunk, Block] | None:
        """Move blocks together, if there is enough in all."""
        room = self.room_bytes() or 0
        if self.chunks.reserved_bytes - self.counts.allocated_bytes + room < size_bytes:
            return None
        if not self.defragment().moved_blocks:
            return None
        return self.chunks.place(size_bytes) or self._exchange_for(size_bytes)


def _space(
    policy: Policy,
    device: torch.device,
    on_new: Callable[[Chunk], None],
    alignment_bytes: int,
    max_bytes: int | None,
) -> Space:
    """Chunks for a policy that places blocks in a given space, segments for one that takes its own."""
    if issubclass(policy.kind, CachingAllocator):
        return Segments(policy, device, on_new, limit_bytes=max_bytes)
    return Chunks(policy, device, on_new, alignment_bytes=alignment_bytes)
