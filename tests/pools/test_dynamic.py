"""Dynamic allocation: correct as any policy, and it changes its manner where that pays."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators import Block, OutOfMemory
from memfit.core.errors import UsageError
from memfit.pools import DynamicAllocation
from memfit.pools.dynamic import FIRST_LOOK, MANNERS, Manner, rounded
from memfit.pools.gaps import Gaps


def space(total_bytes: int = 1 << 30, alignment_bytes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(total_bytes=total_bytes, alignment_bytes=alignment_bytes)


def overlaps(blocks: list[Block]) -> bool:
    spans = sorted((block.offset_bytes, block.offset_bytes + block.size_bytes) for block in blocks)
    return any(end > start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1000)), max_size=200),
    st.sampled_from(MANNERS),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_blocks_lie_apart_inside_and_aligned(actions: list[tuple[int, int]], manner: Manner) -> None:
    allocator = DynamicAllocation(space(4096, 16))
    allocator.manner = manner
    out: list[Block] = []
    for size, index in actions:
        if index % 3 == 0 and out:
            allocator.deallocate(out.pop(index % len(out)))
            continue
        try:
            out.append(allocator.allocate(size))
        except OutOfMemory:
            assert out
        assert not overlaps(out)
    assert all(block.offset_bytes % 16 == 0 for block in out)
    assert all(block.offset_bytes + block.size_bytes <= 4096 for block in out)
    assert all(block.size_bytes >= block.requested_bytes for block in out)
    for block in out:
        allocator.deallocate(block)
    assert allocator.allocate(4096).offset_bytes == 0


def long_and_short_lives(steps: int) -> list[tuple[int, int]]:
    """Pairs of what is kept until the step's end and what is not, as layers make them."""
    operations: list[tuple[int, int]] = []
    made = 0
    for _ in range(steps):
        kept = []
        for _ in range(200):
            operations += [(made, 700), (made + 1, 300), (made, 0)]
            kept.append(made + 1)
            made += 2
        operations += [(block, 0) for block in kept]
    return operations


def run(operations: list[tuple[int, int]], manner: Manner | None = None) -> DynamicAllocation:
    allocator = DynamicAllocation(space())
    if manner is not None:
        allocator.manner = manner
        allocator._next_look = len(operations) + 1
    out: dict[int, Block] = {}
    for block, size in operations:
        if size:
            out[block] = allocator.allocate(size)
        else:
            allocator.deallocate(out.pop(block))
    return allocator


def peak(allocator: DynamicAllocation) -> int:
    return int(allocator.stats()["reserved_bytes"]["all"][1])


def test_it_needs_no_more_than_it_began_with() -> None:
    operations = long_and_short_lives(10)
    assert peak(run(operations)) <= peak(run(operations, MANNERS[0]))


def test_it_changes_where_another_manner_needs_less() -> None:
    generator = random.Random(3)
    operations: list[tuple[int, int]] = []
    alive: list[int] = []
    for made in range(6000):
        # Sizes that are never quite the same: size classes let one block fit where another was.
        operations.append((made, generator.randint(900, 1100) if made % 2 else generator.randint(90, 110)))
        alive.append(made)
        if len(alive) > 60:
            operations.append((alive.pop(generator.randrange(len(alive))), 0))
    adapted = run(operations)
    peaks = {manner: peak(run(operations, manner)) for manner in MANNERS}
    assert peak(adapted) <= 1.1 * min(peaks.values())
    assert adapted.stats()["manner"] == str(adapted.manner)


def test_it_looks_back_only_where_there_is_something_to_gain() -> None:
    allocator = DynamicAllocation(space())
    for _ in range(FIRST_LOOK * 4):
        allocator.deallocate(allocator.allocate(1000))
    assert allocator.changes == []


def test_double_frees_and_foreign_blocks() -> None:
    allocator, other = DynamicAllocation(space()), DynamicAllocation(space())
    first, block = allocator.allocate(10), allocator.allocate(10)
    allocator.deallocate(block)
    with pytest.raises(UsageError, match="not out"):
        allocator.deallocate(block)
    other.allocate(5)
    with pytest.raises(UsageError, match="not out"):
        allocator.deallocate(other.allocate(7))
    with pytest.raises(UsageError, match="negative"):
        allocator.allocate(-1)
    allocator.deallocate(first)


@given(st.integers(0, 1 << 40), st.sampled_from([0, 4, 8]), st.sampled_from([1, 64, 512]))
def test_rounding(size: int, classes: int, alignment: int) -> None:
    result = rounded(size, classes, alignment)
    assert result >= max(size, 1)
    assert result % alignment == 0
    assert result <= max(size * (1 + 1 / max(classes, 1)) + alignment, alignment)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50), st.integers(0, 100)), max_size=80))
def test_gaps_equal_a_bitmap(actions: list[tuple[bool, int, int]]) -> None:
    gaps, taken, out = Gaps(1000), [False] * 1000, []
    for free, size, index in actions:
        if free and out:
            start, length = out.pop(index % len(out))
            gaps.give_back(start, length)
            taken[start : start + length] = [False] * length
            continue
        gap = (gaps.best, gaps.lowest, gaps.highest_best)[index % 3](size)
        start = gaps.extend(size) if gap is None else gaps.take(gap, size, from_end=index % 2 == 0)
        if start is None:
            continue
        assert not any(taken[start : start + size])
        taken[start : start + size] = [True] * size
        out.append((start, size))
        assert gaps.top_bytes == max(place for place, used in enumerate(taken) if used) + 1
