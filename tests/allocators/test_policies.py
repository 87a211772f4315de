"""What is particular to each policy: whom it chooses, how its structure keeps its rules, what it costs."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators import ALLOCATORS, AddressSpaceConfig, BaseAllocator, register_allocator
from memfit.allocators.address_space import AddressSpaceAllocator
from memfit.allocators.base import Block, OutOfMemory
from memfit.allocators.bitmap import MOST_CELLS, BitmapAllocator, BitmapConfig
from memfit.allocators.buddy import BuddyAllocator
from memfit.allocators.comparison import least_total_bytes, run_policy
from memfit.allocators.fibonacci_buddy import FibonacciBuddyAllocator
from memfit.allocators.fibonacci_heap import FibonacciHeap, HeapNode
from memfit.allocators.indexed import TreeIndex
from memfit.allocators.replay import Operation, Step
from memfit.allocators.slab import SlabAllocator, SlabConfig
from memfit.core.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples"


def made(name: str, total_bytes: int = 6400, alignment_bytes: int = 1) -> AddressSpaceAllocator:
    allocator = ALLOCATORS[name](AddressSpaceConfig(total_bytes=total_bytes, alignment_bytes=alignment_bytes))
    assert isinstance(allocator, AddressSpaceAllocator)
    return allocator


def with_holes(name: str, holes: list[int]) -> AddressSpaceAllocator:
    """A full range with free stretches of these sizes, in address order, 10 bytes between them."""
    allocator = made(name, sum(holes) + 10 * len(holes))
    blocks = [allocator.allocate(size) for hole in holes for size in (hole, 10)]
    for block in blocks[::2]:
        allocator.deallocate(block)
    assert [size for _, size in allocator.free_spans()] == holes
    return allocator


@pytest.mark.parametrize(
    ("name", "index"),
    [("first_fit", 1), ("best_fit", 3), ("indexed_fit", 3), ("worst_fit", 2), ("fibonacci_heap", 2)],
)
def test_each_fit_chooses_its_stretch(name: str, index: int) -> None:
    allocator = with_holes(name, [40, 70, 200, 60, 70])
    start = allocator.free_spans()[index][0]
    assert allocator.allocate(55).offset_bytes == start


def test_next_fit_goes_on_from_where_it_was() -> None:
    allocator = with_holes("next_fit", [50, 50, 50])
    first, second, third = (start for start, _ in allocator.free_spans())
    found = [allocator.allocate(30).offset_bytes for _ in range(3)]
    assert found == [first, second, third]
    assert allocator.allocate(20).offset_bytes == third + 30
    assert allocator.allocate(20).offset_bytes == first + 30


@pytest.mark.parametrize(("plain", "indexed"), [("best_fit", "indexed_fit"), ("worst_fit", "fibonacci_heap")])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=120))
@settings(max_examples=60, deadline=None)
def test_an_index_changes_the_cost_not_the_places(
    plain: str, indexed: str, program: list[tuple[bool, int]]
) -> None:
    pairs: list[tuple[Block, Block]] = []
    one, two = made(plain), made(indexed)
    for allocate, number in program:
        if allocate:
            try:
                pairs.append((one.allocate(number), two.allocate(number)))
                assert pairs[-1][0] == pairs[-1][1]
            except OutOfMemory:
                with pytest.raises(OutOfMemory):
                    two.allocate(number)
        elif pairs:
            for allocator, block in zip((one, two), pairs.pop(number % len(pairs)), strict=True):
                allocator.deallocate(block)


def test_segregated_lists_take_the_own_list_first_and_then_the_nearest_above() -> None:
    allocator = with_holes("segregated_fit", [300, 35, 70, 140])
    starts = [start for start, _ in allocator.free_spans()]
    assert allocator.allocate(33).offset_bytes == starts[1]
    assert allocator.allocate(40).offset_bytes == starts[2]
    assert allocator.allocate(200).offset_bytes == starts[0]


def test_tlsf_takes_a_good_fit_without_a_search() -> None:
    allocator = with_holes("tlsf", [1000, 105, 128, 111, 2000])
    starts = [start for start, _ in allocator.free_spans()]
    # Lists are four bytes wide from 64 on: 105 is rounded up to 108, the list of 108 to 111.
    assert allocator.allocate(105).offset_bytes == starts[3]
    assert allocator.allocate(112).offset_bytes == starts[2]
    assert allocator.allocate(105).offset_bytes == starts[0]


def test_tlsf_uses_an_exact_fit_before_it_gives_up() -> None:
    allocator = with_holes("tlsf", [105])
    assert allocator.allocate(105).size_bytes == 105


def powers(total: int) -> list[int]:
    return [1 << bit for bit in reversed(range(total.bit_length())) if total >> bit & 1]


def test_binary_buddies_halve_and_join() -> None:
    allocator = BuddyAllocator(AddressSpaceConfig(total_bytes=64, alignment_bytes=1))
    first, second = allocator.allocate(9), allocator.allocate(30)
    assert (first.offset_bytes, first.size_bytes, second.offset_bytes, second.size_bytes) == (0, 16, 32, 32)
    assert allocator.free_spans() == [(16, 16)]
    allocator.deallocate(first)
    assert allocator.free_spans() == [(0, 32)]
    allocator.deallocate(second)
    assert allocator.free_spans() == [(0, 64)]


@pytest.mark.parametrize("total", [1, 7, 100, 1000, 1023])
def test_binary_buddies_cover_any_range_and_stay_aligned_to_their_size(total: int) -> None:
    allocator = BuddyAllocator(AddressSpaceConfig(total_bytes=total, alignment_bytes=1))
    assert [size for _, size in allocator.free_spans()] == powers(total)
    generator = random.Random(total)
    while True:
        try:
            block = allocator.allocate(generator.randrange(1, 40))
        except OutOfMemory:
            break
        assert block.offset_bytes % block.size_bytes == 0
        assert block.size_bytes < 2 * block.requested_bytes


def test_fibonacci_buddies_split_unevenly_and_join() -> None:
    allocator = FibonacciBuddyAllocator(AddressSpaceConfig(total_bytes=55, alignment_bytes=1))
    block = allocator.allocate(11)  # 55 = 34 + 21, 21 = 13 + 8
    assert (block.offset_bytes, block.size_bytes) == (34, 13)
    assert allocator.free_spans() == [(0, 34), (47, 8)]
    allocator.deallocate(block)
    assert allocator.free_spans() == [(0, 55)]


@pytest.mark.parametrize("total", [1, 2, 54, 100, 1000])
def test_fibonacci_sizes_follow_each_other_closely(total: int) -> None:
    allocator = FibonacciBuddyAllocator(AddressSpaceConfig(total_bytes=total, alignment_bytes=1))
    spans = allocator.free_spans()
    assert sum(size for _, size in spans) == total
    assert all(start + size == following for (start, size), (following, _) in pairwise(spans))
    block = allocator.allocate(1)
    assert block.size_bytes == 1
    wanted = max(1, total // 3)
    assert allocator.allocate(min(wanted, allocator.largest_free_bytes())).size_bytes <= 1.67 * wanted + 1


def test_a_bitmap_finds_the_lowest_run() -> None:
    allocator = with_holes("bitmap", [40, 70, 200])
    starts = [start for start, _ in allocator.free_spans()]
    assert [allocator.allocate(60).offset_bytes for _ in range(3)] == [starts[1], starts[2], starts[2] + 60]


def test_the_cells_of_a_bitmap_are_as_asked_or_as_many_as_allowed() -> None:
    large = BitmapAllocator(AddressSpaceConfig(total_bytes=24 << 30))
    assert (large.cell_bytes, (24 << 30) // large.cell_bytes <= MOST_CELLS) == (128 << 10, True)
    asked = BitmapAllocator(BitmapConfig(total_bytes=10_000, alignment_bytes=100, cell_bytes=1000))
    assert asked.allocate(1).size_bytes == 1000
    with pytest.raises(UsageError, match="cell_bytes=150"):
        BitmapAllocator(BitmapConfig(total_bytes=10_000, alignment_bytes=100, cell_bytes=150))


def test_a_range_that_cuts_its_last_cell_short_is_used_to_its_end() -> None:
    allocator = BitmapAllocator(BitmapConfig(total_bytes=2500, alignment_bytes=100, cell_bytes=1000))
    sizes = [allocator.allocate(500).size_bytes for _ in range(3)]
    assert sizes == [1000, 1000, 500]
    with pytest.raises(OutOfMemory):
        allocator.allocate(1)


def test_small_blocks_of_one_size_share_a_slab() -> None:
    allocator = SlabAllocator(SlabConfig(total_bytes=1 << 20, slab_bytes=16 << 10))
    small = [allocator.allocate(600) for _ in range(16)]
    assert {block.size_bytes for block in small} == {1024}
    assert {block.offset_bytes // (16 << 10) for block in small} == {0}
    large = allocator.allocate(3000)
    assert (large.offset_bytes, large.size_bytes) == (16 << 10, 3072)
    for block in [*small, large]:
        allocator.deallocate(block)
    assert allocator.free_spans() == [(0, 1 << 20)]


def test_without_room_for_a_slab_blocks_still_find_a_place() -> None:
    allocator = SlabAllocator(SlabConfig(total_bytes=64 << 10, alignment_bytes=64, slab_bytes=1 << 10))
    filler = allocator.allocate((62 << 10) + 512)
    first, second = allocator.allocate(100), allocator.allocate(64)  # one slab's worth, and half of one
    assert first.size_bytes == 128
    assert second.size_bytes == 64
    assert filler.offset_bytes == 0


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "decrease", "remove"]), st.integers(0, 10_000))))
@settings(max_examples=100, deadline=None)
def test_the_fibonacci_heap_is_a_heap(program: list[tuple[str, int]]) -> None:
    heap = FibonacciHeap()
    nodes: dict[int, HeapNode] = {}
    for serial, (what, number) in enumerate(program):
        chosen = sorted(nodes)[number % len(nodes)] if nodes else None
        if what == "push":
            nodes[serial] = heap.push((number, serial))
        elif what == "pop" and heap.least is not None:
            del nodes[heap.least.key[1]]
            heap.pop()
        elif chosen is not None and what == "decrease":
            heap.decrease(nodes[chosen], (nodes[chosen].key[0] - number, chosen))
        elif chosen is not None and what == "remove":
            heap.remove(nodes.pop(chosen))
        least = min((node.key for node in nodes.values()), default=None)
        assert (heap.least.key if heap.least else None) == least
    left = [node.key for node in nodes.values()]
    heapq.heapify(left)
    while heap.least is not None:
        assert heap.least.key == heapq.heappop(left)
        heap.pop()
    assert not left


def test_the_degrees_of_a_fibonacci_heap_stay_logarithmic() -> None:
    heap, generator = FibonacciHeap(), random.Random(0)
    nodes = [heap.push((generator.randrange(1 << 30), serial)) for serial in range(4096)]
    heap.remove(nodes.pop())
    for node in nodes:
        heap.decrease(node, (node.key[0] - generator.randrange(1 << 30), node.key[1]))
    heap.pop()
    assert heap.least is not None
    assert max(node.degree for node in nodes) <= 1.45 * 12 + 1


def test_the_tree_stays_shallow_on_sorted_and_strided_starts() -> None:
    for stride in (1, 512, 1 << 21):
        index = TreeIndex()
        for number in range(4096):
            index.add(number * stride, number + 1)

        def depth(node: object) -> int:
            return 0 if node is None else 1 + max(depth(node.left), depth(node.right))  # type: ignore[attr-defined]

        assert depth(index._root) < 50


def operations() -> list[Operation]:
    """Two blocks pin a hole of 100 bytes; then 150 are asked for."""
    sizes = [100, 50, 100, 50]
    listed = [Operation(Step.ALLOC, number, size) for number, size in enumerate(sizes)]
    return [*listed, Operation(Step.FREE, 0), Operation(Step.FREE, 2), Operation(Step.ALLOC, 4, 150)]


def test_a_run_says_what_failed_and_what_was_wasted() -> None:
    run = run_policy(operations(), made("first_fit", 340))
    assert (run.served, run.failed, run.highest_end_bytes) == (4, (6,), 300)
    run = run_policy(operations(), made("buddy", 1024))
    assert (run.peak_requested_bytes, run.peak_allocated_bytes) == (300, 384)
    assert run.internal_waste == pytest.approx(1 - 300 / 384)


def test_the_least_memory_of_a_policy() -> None:
    least = least_total_bytes(operations(), lambda total: made("first_fit", total), from_bytes=300, step=0.01)
    assert least == 450
    with pytest.raises(UsageError, match="1.1 times"):
        least_total_bytes(
            operations(), lambda total: made("first_fit", total), from_bytes=300, most_times=1.1
        )


class Mine(BaseAllocator):
    """A policy in the form that users were promised."""

    def __init__(self, config):  # type: ignore[no-untyped-def]
        self.config, self.used, self.count = config, 0, 0

    def allocate(self, size):  # type: ignore[no-untyped-def, override]
        self.used, self.count = self.used + size, self.count + 1
        return Block(
            block_id=self.count,
            address=self.used,
            size_bytes=size,
            requested_bytes=size,
            offset_bytes=self.used - size,
        )

    def deallocate(self, block):  # type: ignore[no-untyped-def]
        pass


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(ALLOCATORS):
        monkeypatch.setitem(ALLOCATORS, name, ALLOCATORS[name])
    monkeypatch.delitem(ALLOCATORS, "mine", raising=False)
    monkeypatch.setitem(ALLOCATORS, "mine", Mine)
    monkeypatch.delitem(ALLOCATORS, "mine")


def test_a_policy_of_ones_own_is_registered_and_run(table: None) -> None:
    register_allocator("mine", Mine)
    register_allocator("mine", Mine)
    run = run_policy(operations(), ALLOCATORS["mine"](AddressSpaceConfig()))
    assert (run.served, run.highest_end_bytes) == (5, 450)
    with pytest.raises(UsageError, match="is FirstFit's"):
        register_allocator("first_fit", Mine)
    with pytest.raises(UsageError, match="not a subclass"):
        register_allocator("number", int)  # type: ignore[arg-type]


def test_the_example_of_a_custom_allocator_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_allocator.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "two_ends   served 2000, failed 0" in done.stdout
    assert "requests refused" in done.stdout
