"""The step that repeats: found in a history, packed, served, and let go of when the steps are others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators import AddressSpaceConfig, Block
from memfit.pools import DynamicAllocation
from memfit.pools.repeats import SHORTEST_STEP, RepeatedStep, period_of, repeated_step


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(1, 5))
def test_the_period_is_what_a_naive_search_finds(sizes: list[int], shortest: int) -> None:
    count = len(sizes)
    naive = None
    for period in range(shortest, count):
        length = next(
            (k for k in range(count - period) if sizes[-1 - k] != sizes[-1 - k - period]), count - period
        )
        if length >= max(period, count // 2):
            naive = period
            break
    assert period_of(sizes, shortest) == naive


def step_of(layers: int, sizes: list[int]) -> list[tuple[int, int]]:
    """``(index, size)`` and ``(index, 0)``: forward keeps one block of three a layer, backward frees."""
    operations, kept, made = [], [], 0
    for layer in range(layers):
        for part in range(3):
            operations.append((made, sizes[(3 * layer + part) % len(sizes)]))
            if part:
                operations.append((made, 0))
            else:
                kept.append(made)
            made += 1
    return operations + [(block, 0) for block in reversed(kept)]


def run(allocator: DynamicAllocation, steps: int, step: list[tuple[int, int]]) -> list[int]:
    """The highest end of a block, by step; no two blocks ever overlap."""
    tops = []
    for _ in range(steps):
        out: dict[int, Block] = {}
        top = 0
        for index, size in step:
            if size:
                block = out[index] = allocator.allocate(size)
                end = block.offset_bytes + block.size_bytes
                top = max(top, end)
                assert all(
                    other is block
                    or other.offset_bytes >= end
                    or other.offset_bytes + other.size_bytes <= block.offset_bytes
                    for other in out.values()
                )
            else:
                allocator.deallocate(out.pop(index))
        tops.append(top)
    return tops


def irregular_sizes(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice((3, 5, 9, 17, 40, 70)) * 1024 for _ in range(91)]


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_served_from_places_packed_ahead(seed: int) -> None:
    step = step_of(30, irregular_sizes(seed))
    allocator = DynamicAllocation(AddressSpaceConfig(total_bytes=1 << 30, alignment_bytes=512))
    tops = run(allocator, 40, step)
    assert tops[-1] <= tops[0]
    if allocator.stats()["planned_bytes"]:
        assert tops[-1] <= 1.01 * allocator.stats()["requested_bytes"]["all"][1]


def test_other_steps_let_go_of_it() -> None:
    allocator = DynamicAllocation(AddressSpaceConfig(total_bytes=1 << 30, alignment_bytes=512))
    for seed in range(6):
        run(allocator, 20, step_of(25 + seed, irregular_sizes(seed)))
    assert allocator.stats()["allocated_bytes"]["all"][0] == 0
    assert allocator.allocate((1 << 30) - 512).offset_bytes == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_steps_with_deviations_never_overlap(seed: int) -> None:
    generator = random.Random(seed)
    allocator = DynamicAllocation(AddressSpaceConfig(total_bytes=1 << 26, alignment_bytes=64))
    sizes = irregular_sizes(seed % 7)
    for _ in range(25):
        layers = 30 if generator.random() < 0.8 else generator.randint(1, 35)
        run(allocator, 1, step_of(layers, sizes))
    assert allocator.stats()["allocated_bytes"]["all"][0] == 0


def test_a_history_that_repeats_nothing_has_no_step() -> None:
    assert repeated_step([(index, index) for index in range(200)], 1) is None
    assert repeated_step([], 1) is None


def test_what_outlives_a_step_has_no_place_in_it() -> None:
    history, made = [], 0
    for _ in range(4):
        for part in range(SHORTEST_STEP):
            history.append((made, 100 + part))
            if part != 3:
                history.append((made, -1))
            made += 1
    step = repeated_step(history, 1)
    assert isinstance(step, RepeatedStep)
    assert len(step) == SHORTEST_STEP
    assert step.total_bytes == 100 + SHORTEST_STEP - 1
    assert [step.place(100 + part) for part in range(4)][3] is None
