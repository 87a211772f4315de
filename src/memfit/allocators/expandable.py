"""Expandable segments: one address range per stream and pool, with memory mapped into it page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.allocators.chunks import FREE, UNMAPPED, Chunk, FreeList
from memfit.allocators.settings import SMALL_SEGMENT_BYTES

if TYPE_CHECKING:
    from memfit.allocators.caching import CachingAllocator


def best_fit(home: FreeList, index: int) -> int:
    """From the smallest free chunk that fits, step on while the next one could grow to strictly less.

    A free chunk counts with the unmapped space behind it, so that the end of the range is taken last.
    """
    keys, chunks = home.keys, home.chunks
    room = _room(chunks[keys[index]])
    while index + 1 < len(keys) and chunks[keys[index]].region.page_bytes:
        following = _room(chunks[keys[index + 1]])
        if following >= room:
            break
        index, room = index + 1, following
    return index


def _room(chunk: Chunk) -> int:
    after = chunk.next
    return chunk.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def allocate(allocator: CachingAllocator, home: FreeList, size: int) -> Chunk | None:
    """A free chunk of ``size`` or more, mapped where need be, out of its free list; None: no memory."""
    chunk = _candidate(allocator, home, size)
    if chunk.state == UNMAPPED and not _map(allocator, chunk, min(chunk.size, size)):
        return None
    while chunk.size < size:
        following = chunk.next
        assert following is not None
        if not _map(allocator, following, min(size - chunk.size, following.size)):
            return None
        chunk = following  # it took the free chunk before it in
    home.remove(chunk)
    return chunk


def _candidate(allocator: CachingAllocator, home: FreeList, size: int) -> Chunk:
    """The lowest place where free and unmapped neighbours hold ``size``; else the start of a new range."""
    for address in home.unmapped_addresses:
        chunk = home.unmapped[address]
        if chunk.prev is not None and chunk.prev.state == FREE:
            chunk = chunk.prev
        if _holds(chunk, size):
            return chunk
    page = SMALL_SEGMENT_BYTES if home.small else allocator.settings.large_segment_bytes
    total = allocator.config.total_bytes
    space = -(-(total + total // 8) // page) * page
    region = allocator.new_region(home, space, page_bytes=page)
    region.first.state = UNMAPPED
    home.insert_unmapped(region.first)
    return region.first


def _holds(start: Chunk, size: int) -> bool:
    found = 0
    chunk: Chunk | None = start
    while found < size and chunk is not None and chunk.state in (FREE, UNMAPPED):
        found += chunk.size
        chunk = chunk.next
    return found >= size


def _map(allocator: CachingAllocator, chunk: Chunk, size: int) -> bool:
    """Put memory behind the first ``size`` bytes (in whole pages) of an unmapped chunk and make it free."""
    page = chunk.region.page_bytes
    mapped = -(-size // page) * page
    if not allocator.device.take(mapped):
        return False
    home = chunk.home
    home.remove_unmapped(chunk)
    if mapped < chunk.size:
        rest = Chunk(
            chunk.region, home, chunk.offset + mapped, chunk.size - mapped, chunk.order + (mapped >> 9)
        )
        rest.state = UNMAPPED
        _link(rest, chunk, chunk.next)
        home.insert_unmapped(rest)
        chunk.size = mapped
    chunk.state = FREE
    _join(chunk)
    home.insert(chunk)
    allocator.count_reserved(home.counters, mapped)
    allocator.stats_book.device_allocs += 1
    return True


def unmap(allocator: CachingAllocator, chunk: Chunk) -> bool:
    """Give the whole pages in a free chunk back, if it has any; its edges stay free. An unmapped range is
    given up."""
    region, home = chunk.region, chunk.home
    page = region.page_bytes
    start = -(-chunk.offset // page) * page
    end = (chunk.offset + chunk.size) // page * page
    if end <= start:
        return False
    home.remove(chunk)
    if start > chunk.offset:
        edge = Chunk(region, home, chunk.offset, start - chunk.offset, chunk.order)
        _link(edge, chunk.prev, chunk)
        home.insert(edge)
    if (tail := chunk.offset + chunk.size - end) > 0:
        edge = Chunk(region, home, end, tail, chunk.order + ((end - chunk.offset) >> 9))
        _link(edge, chunk, chunk.next)
        home.insert(edge)
    chunk.order += (start - chunk.offset) >> 9
    chunk.offset, chunk.size = start, end - start
    chunk.state = UNMAPPED
    _join(chunk)
    home.insert_unmapped(chunk)
    allocator.device.give_back(end - start)
    allocator.count_reserved(home.counters, start - end)
    allocator.stats_book.device_frees += 1
    if chunk.prev is None and chunk.next is None:
        home.remove_unmapped(chunk)
        del allocator.regions[region.ordinal]
    return True


def _link(chunk: Chunk, before: Chunk | None, after: Chunk | None) -> None:
    chunk.prev, chunk.next = before, after
    if before is None:
        chunk.region.first = chunk
    else:
        before.next = chunk
    if after is not None:
        after.prev = chunk


def _join(chunk: Chunk) -> None:
    """Take neighbours in the same state (free or unmapped) in."""
    for neighbour in (chunk.prev, chunk.next):
        if neighbour is None or neighbour.state != chunk.state:
            continue
        take_out = chunk.home.remove if chunk.state == FREE else chunk.home.remove_unmapped
        take_out(neighbour)
        if neighbour is chunk.prev:
            chunk.offset, chunk.order = neighbour.offset, neighbour.order
            _link(chunk, neighbour.prev, chunk.next)
        else:
            _link(chunk, chunk.prev, neighbour.next)
        chunk.size += neighbour.size
