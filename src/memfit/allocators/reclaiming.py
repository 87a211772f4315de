"""How PyTorch's allocator gives cached memory back to the device: the cache, large blocks, garbage."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from memfit.allocators import expandable
from memfit.allocators.chunks import ORDER_BITS, Chunk, FreeList
from memfit.allocators.settings import UNLIMITED_BYTES

if TYPE_CHECKING:
    from memfit.allocators.caching import CachingAllocator


def give_back(allocator: CachingAllocator, chunk: Chunk) -> None:
    """Free a whole cached segment."""
    home = chunk.home
    home.remove(chunk)
    allocator.device.give_back(chunk.size)
    home.counters.segments -= 1
    allocator.count_reserved(home.counters, -chunk.size)
    allocator.stats_book.device_frees += 1
    if chunk.size >= allocator.max_split_bytes:
        allocator.stats_book.oversize_segments.add(-1)
    del allocator.regions[chunk.region.ordinal]


def release_cached(allocator: CachingAllocator, *, common: bool = True) -> None:
    """Give every cached segment back, and every whole free page of expandable ones.

    Private pools keep theirs until they are released; ``common=False`` leaves what is in no private pool.
    """
    for small in (False, True):
        for home in allocator.homes(small=small):
            if home.shared.released if home.shared.pool else common:
                release_home(allocator, home)


def release_pool(allocator: CachingAllocator, pool: int) -> None:
    """The owner of a private pool lets it go: what it has cached goes back now, the rest with a later cache.

    To wait for its blocks' streams is to wait for all that was freed before; to unmap a page, for everything.
    """
    allocator.stats_book.syncs += 1
    allocator.wait_for_pool(pool)
    unmapped = False
    for small in (False, True):
        allocator.share(small=small, pool=pool).released = True
        for home in allocator.homes(small=small):
            if home.shared.pool == pool and release_home(allocator, home):
                unmapped = True
    if unmapped:
        allocator.synchronize()


def release_home(allocator: CachingAllocator, home: FreeList) -> bool:
    """Give back what one free list has cached; whether a page was unmapped."""
    kept = []
    for chunk in home.in_order():
        if chunk.region.page_bytes:
            kept.append(chunk)
        elif chunk.prev is None and chunk.next is None:
            give_back(allocator, chunk)
    return sum(expandable.unmap(allocator, chunk) for chunk in kept) > 0


def give_back_oversize(allocator: CachingAllocator, home: FreeList, size: int) -> bool:
    """With max_split_size: free one cached block that is large enough, or several large ones."""
    limit = allocator.max_split_bytes
    if limit >= UNLIMITED_BYTES:
        return False
    wanted = max(size, limit)
    index = bisect_left(home.keys, wanted << ORDER_BITS)
    if index < len(home.keys):
        chunk = home.chunks[home.keys[index]]
        if not chunk.region.page_bytes:
            give_back(allocator, chunk)
        return not chunk.region.page_bytes
    freed = 0
    for chunk in reversed(home.in_order()):
        if freed >= wanted or chunk.size < limit:
            break
        if not chunk.region.page_bytes:
            freed += chunk.size
            give_back(allocator, chunk)
    return freed >= wanted


def flush(allocator: CachingAllocator, home: FreeList, size: int) -> bool:
    """Give the whole cache back, for one more try."""
    allocator.empty_cache()
    allocator.stats_book.retries += 1
    return True


def collect_garbage(allocator: CachingAllocator) -> None:
    """Free old cached segments once more than the threshold is reserved, oldest half first."""
    assert allocator.limit_bytes is not None
    threshold = allocator.settings.garbage_collection_threshold
    target = allocator.reserved_bytes - int(threshold * allocator.limit_bytes)
    if target <= 0:
        return
    homes = [home for home in allocator.homes(small=False) if not home.shared.pool]
    searches = homes[0].shared.searches if homes else 0
    cached = [
        chunk
        for home in homes
        for chunk in home.in_order()
        if chunk.prev is None and chunk.next is None and not chunk.region.page_bytes
    ]
    reclaimed = 0
    while cached and reclaimed < target:
        mean_age = sum(searches - chunk.born for chunk in cached) / len(cached)
        old = [chunk for chunk in cached if searches - chunk.born >= mean_age]
        cached = [chunk for chunk in cached if searches - chunk.born < mean_age]
        for chunk in old:
            reclaimed += chunk.size
            give_back(allocator, chunk)
