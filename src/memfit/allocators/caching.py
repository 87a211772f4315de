"""PyTorch's CUDA caching allocator, modelled exactly: same blocks, same segments, same counters.

The rules were established against the compiled allocator of torch 2.14.1 (see ``docs/architecture.md``); the
tests replay traces whose results that allocator gave. Memory here is address space only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.allocators import expandable, reclaiming, statistics
from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.chunks import (
    ALLOCATED,
    CREATION_SHIFT,
    FREE,
    ORDER_BITS,
    PENDING,
    Chunk,
    Counters,
    Device,
    FreeList,
    PoolShare,
    Region,
)
from memfit.allocators.settings import (
    BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    CachingSettings,
    parse_settings,
    round_size,
    segment_bytes,
)
from memfit.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CachingConfig:
    """What a caching allocator is built from.

    Attributes:
        total_bytes: memory of the device.
        settings: the allocator's settings, or the text of ``PYTORCH_ALLOC_CONF``.
        memory_fraction: as ``torch.cuda.set_per_process_memory_fraction``; ``None`` leaves what the settings
            say, and 1.0 sets no limit, whatever they say.
        events: ``"instant"``: work on other streams is done when a block is freed; ``"manual"``: it is
            pending until `CachingAllocator.synchronize`.
        tie_break: between free blocks of one size, the segment that was made first (torch from 2.14), or the
            lowest address (before).
    """

    total_bytes: int = 80 << 30
    settings: CachingSettings | str = field(default_factory=CachingSettings)
    memory_fraction: float | None = None
    events: Literal["instant", "manual"] = "instant"
    tie_break: Literal["creation", "address"] = "creation"

    def resolved(self) -> CachingSettings:
        """The settings as values."""
        return parse_settings(self.settings).settings if isinstance(self.settings, str) else self.settings


class CachingAllocator(BaseAllocator):
    """The allocator behind ``torch.empty(..., device="cuda")``.

    `allocate` and `deallocate` are the interface of every policy; `malloc` and `free` are the same on the
    inner chunks, for replays of millions of events.

    Examples:
        >>> allocator = CachingAllocator(CachingConfig(total_bytes=1 << 30))
        >>> block = allocator.allocate(1_000_000)
        >>> allocator.reserved_bytes, block.size_bytes
        (2097152, 1000448)
    """

    def __init__(self, config: CachingConfig | None = None) -> None:
        config = config or CachingConfig()
        self.config = config
        self.settings = config.resolved()
        if self.settings.backend != "native":
            raise UsageError(
                f"backend:{self.settings.backend} is the driver's own allocator; only native is modelled"
            )
        fraction = config.memory_fraction
        if fraction is None:
            fraction = self.settings.per_process_memory_fraction
        self.device = Device(config.total_bytes)
        self.limit_bytes = int(fraction * config.total_bytes) if fraction < 1.0 else None
        # What throw_on_cudamalloc_oom goes by: the settings' own fraction, whatever the limit is.
        self._rejection_bytes = int(self.settings.per_process_memory_fraction * config.total_bytes)
        self.reserved_bytes = 0
        self.stats_book = statistics.StatsBook(self)
        self.small, self.large = Counters(), Counters()
        self.regions: dict[int, Region] = {}
        self._lists: dict[tuple[int, bool, int], FreeList] = {}
        self._shared: dict[tuple[int, bool], PoolShare] = {}
        self._collects = self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        self.max_split_bytes = self.settings.max_split_size_bytes
        self._expandable = self.settings.expandable_segments
        self._plain_rounding = max(self.settings.roundup_power2_divisions) <= 1
        self._pending: list[tuple[Chunk, bool]] = []
        self.rising = False  # totals went up since peaks were last noted
        self._out: dict[int, Chunk] = {}
        self._next_id = 0

    # The interface of every policy.

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        """Hand out a block. An empty request gets a block without memory, as in PyTorch.

        Raises:
            OutOfMemory: not even after the whole cache was given back.
            UsageError: a negative size.
        """
        if size_bytes < 0:
            raise UsageError(f"allocate({size_bytes}): a size cannot be negative")
        block_id = self._next_id
        self._next_id += 1
        if size_bytes == 0:
            return Block(
                block_id=block_id,
                address=0,
                size_bytes=0,
                requested_bytes=0,
                stream=stream,
                region=-1,
                offset_bytes=0,
            )
        chunk = self._out[block_id] = self.malloc(size_bytes, stream)
        return Block(
            block_id=block_id,
            address=chunk.address,
            size_bytes=chunk.size,
            requested_bytes=size_bytes,
            stream=stream,
            region=chunk.region.ordinal,
            offset_bytes=chunk.offset,
        )

    def deallocate(self, block: Block) -> None:
        """Take a block back into the cache.

        Raises:
            UsageError: the block is not out (freed twice, or another allocator's).
        """
        if block.size_bytes:
            self.free(self._chunk_of(block, "deallocate", forget=True))

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that work on ``stream`` uses the block: once freed, it waits for that work."""
        if block.size_bytes:
            self.use(self._chunk_of(block, "record_stream"), stream)

    def stats(self) -> dict[str, Any]:
        """The counters of ``torch.cuda.memory_stats``: ``{name: {"all" | "small" | "large": [current, peak,
        allocated, freed]}}`` and plain numbers."""
        return self.stats_book.report()

    def _chunk_of(self, block: Block, what: str, *, forget: bool = False) -> Chunk:
        chunk = self._out.get(block.block_id)
        if chunk is None or chunk.address != block.address:
            raise UsageError(
                f"{what}: block {block.block_id} at {block.address:#x} is not allocated here (freed twice?)"
            )
        if forget:
            del self._out[block.block_id]
        return chunk

    # The same on chunks.

    def malloc(self, requested: int, stream: int = 0, pool: int = 0) -> Chunk:
        """Find or make a chunk for ``requested`` > 0 bytes.

        Raises:
            OutOfMemory: as `allocate`.
        """
        if self._pending:
            self.process_events()
        size = (requested + 511) & -512 if self._plain_rounding else round_size(requested, self.settings)
        small = size <= SMALL_LIMIT_BYTES
        home = self._lists.get((stream, small, pool)) or self.home(stream, small=small, pool=pool)
        counters = home.counters
        if self._collects:
            home.shared.searches += 1
        keys = home.keys
        index = bisect_left(keys, size << ORDER_BITS)
        if index < len(keys) and (index := self._admissible(home, index, size)) >= 0:
            chunk = home.chunks.pop(keys.pop(index))
        else:
            chunk = self._grow(home, size, requested)
        rest = chunk.size - size
        plain = not chunk.region.page_bytes
        split = chunk.prev is not None or chunk.next is not None
        if rest >= BLOCK_BYTES and (
            home.small or self._expandable or (size < self.max_split_bytes and rest > SMALL_LIMIT_BYTES)
        ):
            chunk = self._cut(chunk, home, size)
            if plain:
                if split:
                    counters.split_bytes -= size
                else:
                    counters.split_bytes += rest
                    counters.split_bytes_total += rest
                    counters.split_count += 1
                    counters.split_count_total += 1
                    self.stats_book.note_split(counters)
        elif split and plain:
            counters.split_bytes -= chunk.size
            counters.split_count -= 1
        size = chunk.size
        chunk.state = ALLOCATED
        chunk.requested = requested
        counters.count += 1
        counters.count_total += 1
        counters.bytes += size
        counters.bytes_total += size
        counters.requested += requested
        counters.requested_total += requested
        self.rising = True
        if size >= self.max_split_bytes:
            self.stats_book.oversize_allocations.add(1)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Give a chunk from `malloc` back; it waits for its other streams, if it has any."""
        if self.rising:
            self.stats_book.note_peaks()
        counters = chunk.home.counters
        counters.count -= 1
        counters.bytes -= chunk.size
        if chunk.size >= self.max_split_bytes:
            self.stats_book.oversize_allocations.add(-1)
        if chunk.streams:
            chunk.state = PENDING
            counters.pending_count += 1
            counters.pending_bytes += chunk.size
            self._pending.append((chunk, self.config.events == "instant"))
        else:
            self._release(chunk)

    def use(self, chunk: Chunk, stream: int) -> None:
        """`record_stream` on a chunk; its own stream does not count."""
        if stream != chunk.home.stream:
            chunk.streams = (chunk.streams or set()) | {stream}

    def synchronize(self) -> None:
        """All work that was recorded is done; the blocks come back at the next allocation."""
        self._pending = [(chunk, True) for chunk, _ in self._pending]

    def release_pool(self, pool: int) -> None:
        """The owner of a private pool (``torch.cuda.MemPool``, a CUDA graph) lets it go."""
        reclaiming.release_pool(self, pool)

    def empty_cache(self) -> None:
        """Give every cached segment (and every whole free page of expandable ones) back to the device."""
        self.stats_book.syncs += 1
        self.synchronize()
        self.process_events()
        reclaiming.release_cached(self)

    # What they are made of.

    def home(self, stream: int, *, small: bool, pool: int = 0) -> FreeList:
        """The free list of a stream and a size class, in a private pool or (0) in none; made if need be."""
        known = self._lists.get((stream, small, pool))
        if known is None:
            shared = self.share(small=small, pool=pool)
            counters = self.small if small else self.large
            known = FreeList(small=small, stream=stream, counters=counters, shared=shared)
            self._lists[stream, small, pool] = known
        return known

    def share(self, *, small: bool, pool: int = 0) -> PoolShare:
        """What the free lists of a size class have in common, in a private pool or (0) in none."""
        return self._shared.setdefault((pool, small), PoolShare(pool=pool))

    def lanes(self) -> list[tuple[int, bool, int]]:
        """The stream, size class and private pool of every free list there is."""
        return list(self._lists)

    def homes(self, *, small: bool) -> list[FreeList]:
        """The free lists of a size class, of all streams and private pools."""
        return [home for (_, is_small, _), home in self._lists.items() if is_small == small]

    def _admissible(self, home: FreeList, index: int, size: int) -> int:
        """The index of the chunk to take, given the best fit; -1 where none may be taken."""
        if self._expandable:
            index = expandable.best_fit(home, index)
        found = home.keys[index] >> ORDER_BITS
        if size < self.max_split_bytes <= found:
            return -1
        if size >= self.max_split_bytes and found >= size + self.settings.non_split_rounding_bytes:
            return -1
        return index

    def _cut(self, chunk: Chunk, home: FreeList, size: int) -> Chunk:
        """Take the first ``size`` bytes of a chunk as one of their own; the rest goes into the free list."""
        head = Chunk(chunk.region, home, chunk.offset, size, chunk.order)
        before = head.prev = chunk.prev
        head.next = chunk
        if before is None:
            chunk.region.first = head
        else:
            before.next = head
        chunk.prev = head
        chunk.offset += size
        chunk.size -= size
        chunk.order += size >> 9
        key = (chunk.size << ORDER_BITS) | chunk.order
        insort(home.keys, key)
        home.chunks[key] = chunk
        chunk.born = home.shared.searches
        return head

    def _release(self, chunk: Chunk) -> None:
        """Put a chunk that nobody uses into its free list, joined with its free neighbours."""
        home = chunk.home
        counters = home.counters
        counters.requested -= chunk.requested
        own = chunk.size
        joined = 0
        before, after = chunk.prev, chunk.next
        if before is not None and before.state == FREE:
            home.remove(before)
            chunk.offset = before.offset
            chunk.order = before.order
            chunk.size += before.size
            chunk.prev = before.prev
            if before.prev is None:
                chunk.region.first = chunk
            else:
                before.prev.next = chunk
            joined += 1
        if after is not None and after.state == FREE:
            home.remove(after)
            chunk.size += after.size
            chunk.next = after.next
            if after.next is not None:
                after.next.prev = chunk
            joined += 1
        chunk.state = FREE
        key = (chunk.size << ORDER_BITS) | chunk.order
        insort(home.keys, key)
        home.chunks[key] = chunk
        chunk.born = home.shared.searches
        if not chunk.region.page_bytes:
            self._count_inactive(counters, own, joined, chunk)

    def _count_inactive(self, counters: Counters, own: int, joined: int, chunk: Chunk) -> None:
        """PyTorch counts free parts of split segments by their net change, all at once."""
        if chunk.prev is not None or chunk.next is not None:
            counters.split_bytes += own
            counters.split_bytes_total += own
            counters.split_count += 1 - joined
            if joined == 0:
                counters.split_count_total += 1
            self.stats_book.note_split(counters)
        else:
            counters.split_bytes -= chunk.size - own
            counters.split_count -= joined

    def process_events(self) -> None:
        """Release the chunks whose other streams are done."""
        done = [chunk for chunk, is_done in self._pending if is_done]
        self._pending = [entry for entry in self._pending if not entry[1]]
        self._release_pending(done)

    def wait_for_pool(self, pool: int) -> None:
        """Release the chunks of a private pool; what was freed before the last of them is done then, too."""
        own = [chunk for chunk, _ in self._pending if chunk.home.shared.pool == pool]
        waiting, passed = [], 0
        for chunk, is_done in self._pending:
            if chunk.home.shared.pool == pool:
                passed += 1
            else:
                waiting.append((chunk, is_done or passed < len(own)))
        self._pending = waiting
        self._release_pending(own)

    def _release_pending(self, done: list[Chunk]) -> None:
        # PyTorch walks a table of streams and frees a block at the last one that used it: the default stream
        # first, then the newest. The order shows only in the peak and the running count of inactive_split.
        done.sort(key=lambda chunk: max(-stream if stream else -(1 << 62) for stream in chunk.streams or {0}))
        for chunk in done:
            if self.rising:
                self.stats_book.note_peaks()
            chunk.streams = None
            chunk.home.counters.pending_count -= 1
            chunk.home.counters.pending_bytes -= chunk.size
            self._release(chunk)

    def _grow(self, home: FreeList, size: int, requested: int) -> Chunk:
        """No cached chunk serves: collect, ask the device, give back what is cached, ask again."""
        if self._collects:
            reclaiming.collect_garbage(self)
        for give_back in (None, reclaiming.give_back_oversize, reclaiming.flush):
            if give_back is not None and not give_back(self, home, size):
                continue
            if (chunk := self._ask_device(home, size, requested)) is not None:
                return chunk
        self.stats_book.ooms += 1
        raise self._out_of_memory(requested)

    def _out_of_memory(self, requested: int) -> OutOfMemory:
        return OutOfMemory(
            requested_bytes=requested,
            reserved_bytes=self.reserved_bytes,
            limit_bytes=self.config.total_bytes if self.limit_bytes is None else self.limit_bytes,
            allocated_bytes=self.small.bytes + self.large.bytes,
        )

    def _ask_device(self, home: FreeList, size: int, requested: int) -> Chunk | None:
        """A new segment, or memory mapped into an expandable one.

        Raises:
            OutOfMemory: with ``throw_on_cudamalloc_oom``, where the device would refuse.
        """
        wanted = segment_bytes(size, self.settings)
        if self.limit_bytes is not None and self.reserved_bytes + wanted > self.limit_bytes:
            return None
        if self.settings.throw_on_cudamalloc_oom and self.reserved_bytes + wanted > self._rejection_bytes:
            self.stats_book.rejections += 1
            raise self._out_of_memory(requested)
        if self._expandable:
            return expandable.allocate(self, home, size)
        if not self.device.take(wanted):
            return None
        region = self.new_region(home, wanted)
        home.counters.segments += 1
        home.counters.segments_total += 1
        self.count_reserved(home.counters, wanted)
        self.stats_book.note_segments(home.counters)
        self.stats_book.device_allocs += 1
        if wanted >= self.max_split_bytes:
            self.stats_book.oversize_segments.add(1)
        return region.first

    def new_region(self, home: FreeList, size: int, *, page_bytes: int = 0) -> Region:
        """Address space for a segment, as one chunk that is in no list yet."""
        region = self.device.new_region(size, page_bytes=page_bytes)
        by_creation = self.config.tie_break == "creation"
        order = region.ordinal << CREATION_SHIFT if by_creation else region.address >> 9
        region.first = Chunk(region, home, 0, size, order)
        self.regions[region.ordinal] = region
        return region

    def count_reserved(self, counters: Counters, size: int) -> None:
        """Account for ``size`` bytes (negative: given back) of device memory."""
        self.reserved_bytes += size
        counters.reserved += size
        if size > 0:
            counters.reserved_total += size
            self.stats_book.note_reserved(counters)

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk of every region, in address order."""
        for region in sorted(self.regions.values(), key=lambda region: region.address):
            chunk: Chunk | None = region.first
            while chunk is not None:
                yield chunk
                chunk = chunk.next
