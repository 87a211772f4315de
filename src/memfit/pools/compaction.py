"""Moving blocks together, so that what is free is in one piece."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.allocators.base import Block
from memfit.core.units import format_bytes
from memfit.pools.chunks import Chunk, Chunks, Space
from memfit.pools.holdings import Holding
from memfit.pools.memory import RealMemory


@dataclass(frozen=True, kw_only=True)
class Defragmentation:
    """What moving blocks together came to.

    Attributes:
        moved_blocks, moved_bytes: what was copied.
        pinned_blocks: what had to stay because tensors look into it.
        largest_free_before_bytes, largest_free_after_bytes: the longest free piece.
    """

    moved_blocks: int
    moved_bytes: int
    pinned_blocks: int
    largest_free_before_bytes: int
    largest_free_after_bytes: int

    def __str__(self) -> str:
        return (
            f"moved {self.moved_blocks} blocks ({format_bytes(self.moved_bytes)}),"
            f" {self.pinned_blocks} stayed for their tensors; largest free piece"
            f" {format_bytes(self.largest_free_before_bytes)} → {format_bytes(self.largest_free_after_bytes)}"
        )


def compact(chunks: Space, holdings: Iterable[Holding]) -> tuple[int, int]:
    """Move what may move: within each chunk to its start, then out of chunks that can be emptied.

    Returns:
        The number of blocks moved, and their bytes.
    """
    by_chunk: dict[Chunk, list[Holding]] = {chunk: [] for chunk in chunks}
    for holding in holdings:
        by_chunk[holding.chunk].append(holding)
    moved = [0, 0]
    for chunk, inside in by_chunk.items():
        if chunk.fixed:
            continue
        inside.sort(key=lambda holding: holding.offset_bytes)
        if isinstance(chunks, Chunks) and not any(holding.pinned() for holding in inside):
            _add(moved, _repack(chunks, chunk, inside))
        else:
            _add(moved, _lower(chunk, inside))
    _add(moved, _evacuate(chunks, holdings))
    return moved[0], moved[1]


def largest_free_bytes(chunks: Iterable[Chunk], holdings: Iterable[Holding]) -> int:
    """The longest stretch of reserved memory that no block lies in."""
    spans: dict[Chunk, list[tuple[int, int]]] = {chunk: [] for chunk in chunks}
    for holding in holdings:
        spans[holding.chunk].append((holding.offset_bytes, holding.offset_bytes + holding.size_bytes))
    longest = 0
    for chunk, taken in spans.items():
        end = 0
        for start, stop in sorted(taken):
            longest = max(longest, start - end)
            end = stop
        longest = max(longest, chunk.size_bytes - end)
    return longest


def copy_bytes(source: RealMemory, start: int, target: RealMemory, to: int, size_bytes: int) -> None:
    """Copy within or between pieces of memory; the two ranges may overlap."""
    if source.device.type == "cpu":
        ctypes.memmove(target.address + to, source.address + start, size_bytes)
        return
    piece = source.raw(start, size_bytes)
    overlap = source is target and abs(start - to) < size_bytes
    target.raw(to, size_bytes).copy_(piece.clone() if overlap else piece)


def _repack(chunks: Chunks, chunk: Chunk, inside: list[Holding]) -> tuple[int, int]:
    """Place all blocks of a chunk afresh, in address order, if that moves each one down or not at all: then
    none is copied over another that is still to move."""
    twin = chunks.over(chunk.memory)
    placed: list[Block] = []
    for holding in inside:
        block = twin.place(holding.asked_bytes)
        if block is None or block.offset_bytes > holding.offset_bytes:
            return _lower(chunk, inside)
        if placed and block.offset_bytes < placed[-1].offset_bytes:
            return _lower(chunk, inside)
        placed.append(block)
    moved = [0, 0]
    for holding, block in zip(inside, placed, strict=True):
        _add(moved, _move(holding, twin, block))
    chunks.adopt(chunk, twin)
    return moved[0], moved[1]


def _lower(chunk: Chunk, inside: list[Holding]) -> tuple[int, int]:
    """Move blocks down one by one, the highest first, wherever the policy offers a lower place."""
    moved = [0, 0]
    for holding in reversed(inside):
        if holding.pinned():
            continue
        block = chunk.place(holding.asked_bytes)
        if block is None:
            continue
        if block.offset_bytes < holding.offset_bytes:
            old = holding.block
            _add(moved, _move(holding, chunk, block))
            chunk.give_back(old)
        else:
            chunk.give_back(block)
    return moved[0], moved[1]


def _evacuate(chunks: Space, holdings: Iterable[Holding]) -> tuple[int, int]:
    """Empty the chunks that hold least into the others."""
    moved = [0, 0]
    by_chunk: dict[Chunk, list[Holding]] = {}
    for holding in holdings:
        by_chunk.setdefault(holding.chunk, []).append(holding)
    for chunk in sorted(by_chunk, key=lambda chunk: sum(inside.size_bytes for inside in by_chunk[chunk])):
        inside = by_chunk[chunk]
        if chunk.fixed or any(holding.pinned() for holding in inside):
            continue
        others = [other for other in chunks if other.blocks and not other.fixed and other is not chunk]
        targets = _places_for(inside, others)
        if targets is None:
            continue
        for holding, (other, block) in zip(inside, targets, strict=True):
            old = holding.block
            _add(moved, _move(holding, other, block))
            chunk.give_back(old)
    return moved[0], moved[1]


def _places_for(inside: list[Holding], others: list[Chunk]) -> list[tuple[Chunk, Block]] | None:
    """A place in other chunks for each block, or None, and nothing taken, if one finds none."""
    targets: list[tuple[Chunk, Block]] = []
    for holding in inside:
        for other in others:
            block = other.place(holding.asked_bytes)
            if block is not None:
                targets.append((other, block))
                break
        else:
            for other, block in targets:
                other.give_back(block)
            return None
    return targets


def _move(holding: Holding, chunk: Chunk, block: Block) -> tuple[int, int]:
    """Copy a block's bytes to its new place; what moved."""
    moves = chunk.memory is not holding.chunk.memory or block.offset_bytes != holding.offset_bytes
    if moves:
        size_bytes = holding.requested_bytes
        copy_bytes(holding.chunk.memory, holding.offset_bytes, chunk.memory, block.offset_bytes, size_bytes)
    moved = (1, holding.requested_bytes) if moves else (0, 0)
    holding.move_to(chunk, block)
    return moved


def _add(total: list[int], more: tuple[int, int]) -> None:
    total[0] += more[0]
    total[1] += more[1]
