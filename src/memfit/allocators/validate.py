"""Naive checks that say which rule is broken. Slow and obvious on purpose: they judge the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memfit.allocators.base import Block
from memfit.allocators.lifetimes import Lifetimes


def packing_problem(
    lifetimes: Lifetimes,
    offsets: Sequence[int],
    *,
    capacity_bytes: int | None = None,
    alignment_bytes: int = 1,
) -> str | None:
    """The first rule that a packing breaks, in words, or None. Compares all pairs: O(blocks²).

    Rules: one offset a block; none negative; all multiples of the alignment; none ends above the capacity; no
    two blocks that live at the same time share a byte.
    """
    if len(offsets) != len(lifetimes):
        return f"{len(offsets)} offsets for {len(lifetimes)} blocks"
    columns = (lifetimes.lower, lifetimes.upper, lifetimes.size_bytes)
    blocks = list(zip(*(column.tolist() for column in columns), (int(o) for o in offsets), strict=True))
    for index, (_, _, size, offset) in enumerate(blocks):
        if offset < 0:
            return f"block {index} has the negative offset {offset}"
        if offset % alignment_bytes:
            return f"block {index} at {offset} is not aligned to {alignment_bytes}"
        if capacity_bytes is not None and offset + size > capacity_bytes:
            return f"block {index} ends at {offset + size}, above the capacity {capacity_bytes}"
    start = np.array(offsets, dtype=np.int64)
    end = start + lifetimes.size_bytes
    for one, (lower, upper, size, offset) in enumerate(blocks):
        lives_together = (lifetimes.lower[:one] < upper) & (lower < lifetimes.upper[:one])
        overlaps = lives_together & (start[:one] < offset + size) & (offset < end[:one])
        if overlaps.any():
            return f"blocks {int(overlaps.argmax())} and {one} live at the same time and overlap"
    return None


def blocks_problem(
    blocks: Iterable[Block], *, total_bytes: int, alignment_bytes: int, base_address: int
) -> str | None:
    """The first rule that blocks which are out at one moment break, in words, or None.

    Rules: a block holds at least what was asked for; it lies within the range; its address is its offset from
    the base; it is aligned; no two share a byte; no two share an id.
    """
    seen: set[int] = set()
    end = 0
    for block in sorted(blocks, key=lambda block: (block.offset_bytes, block.block_id)):
        name = f"block {block.block_id} ({block.size_bytes} bytes at {block.offset_bytes})"
        if block.block_id in seen:
            return f"{name}: its id is in use already"
        seen.add(block.block_id)
        if block.requested_bytes == 0 and block.size_bytes == 0:
            continue
        for rule, broken in (
            (
                f"smaller than the {block.requested_bytes} bytes asked for",
                block.size_bytes < block.requested_bytes,
            ),
            (
                f"outside of the {total_bytes} bytes there are",
                not 0 <= block.offset_bytes <= total_bytes - block.size_bytes,
            ),
            (
                f"its address {block.address} is not {base_address} + its offset",
                block.address != base_address + block.offset_bytes,
            ),
            (f"not aligned to {alignment_bytes}", block.offset_bytes % alignment_bytes != 0),
            (f"overlaps the block that ends at {end}", block.offset_bytes < end),
        ):
            if broken:
                return f"{name}: {rule}"
        end = block.offset_bytes + block.size_bytes
    return None
