"""What every policy over one range of addresses must keep, whatever it is asked; also on real memory."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators import ALLOCATORS, AddressSpaceConfig
from memfit.allocators.address_space import AddressSpaceAllocator
from memfit.allocators.base import Block, OutOfMemory
from memfit.allocators.chunks import DEVICE_BASE_ADDRESS
from memfit.allocators.validate import blocks_problem
from memfit.core.errors import UsageError

NAMES = [name for name, kind in ALLOCATORS.items() if issubclass(kind, AddressSpaceAllocator)]
KIB = 1 << 10
every_policy = pytest.mark.parametrize("name", NAMES)
spaces = st.sampled_from(
    [(64 * KIB, 512), (100 * KIB, 512), (37 * 256 + 100, 256), (40_000, 1), (5 * 512, 512), (200 * KIB, 64)]
)
programs = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 20 * KIB)),
        st.tuples(st.just("alloc"), st.integers(1, 2 * KIB)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16)),
    ),
    max_size=70,
)


def policy(name: str, total_bytes: int = 64 * KIB, alignment_bytes: int = 512) -> AddressSpaceAllocator:
    made = ALLOCATORS[name](AddressSpaceConfig(total_bytes=total_bytes, alignment_bytes=alignment_bytes))
    assert isinstance(made, AddressSpaceAllocator)
    return made


def check(allocator: AddressSpaceAllocator, live: list[Block]) -> None:
    """Blocks and books are right, and blocks with free blocks cover no byte twice."""
    problem = blocks_problem(
        live,
        total_bytes=allocator.total_bytes,
        alignment_bytes=allocator.alignment_bytes,
        base_address=DEVICE_BASE_ADDRESS,
    )
    assert problem is None, problem
    stats = allocator.stats()
    assert stats["allocated_bytes"]["all"][0] == sum(block.size_bytes for block in live)
    assert stats["requested_bytes"]["all"][0] == sum(block.requested_bytes for block in live)
    assert stats["allocation"]["all"][0] == sum(block.size_bytes > 0 for block in live)
    free = allocator.free_spans()
    spans = sorted([*free, *((block.offset_bytes, block.size_bytes) for block in live if block.size_bytes)])
    assert all(
        start + size <= following for (start, size), (following, _) in zip(spans, spans[1:], strict=False)
    )
    assert sum(size for _, size in spans) <= allocator.total_bytes
    assert allocator.largest_free_bytes() == max((size for _, size in free), default=0)


@every_policy
@given(space=spaces, program=programs)
@settings(max_examples=40, deadline=None)
def test_any_program_keeps_the_rules(
    name: str, space: tuple[int, int], program: list[tuple[str, int]]
) -> None:
    allocator = policy(name, *space)
    untouched = allocator.free_spans()
    live: list[Block] = []
    for what, number in program:
        if what == "alloc":
            try:
                live.append(allocator.allocate(number))
            except OutOfMemory as failure:
                assert failure.requested_bytes == number
                assert failure.largest_free_bytes == allocator.largest_free_bytes()
        elif live:
            allocator.deallocate(live.pop(number % len(live)))
        check(allocator, live)
    for block in live:
        allocator.deallocate(block)
    check(allocator, [])
    assert allocator.free_spans() == untouched


@dataclass
class RealMemory:
    """Bytes behind an allocator's offsets. Each block is filled with its own pattern, which must still be
    there when it is freed."""

    allocator: AddressSpaceAllocator
    memory: mmap.mmap

    def allocate(self, size_bytes: int) -> Block:
        block = self.allocator.allocate(size_bytes)
        self.memory[block.offset_bytes : block.offset_bytes + block.size_bytes] = self.pattern(block)
        return block

    def deallocate(self, block: Block) -> None:
        end = block.offset_bytes + block.size_bytes
        assert self.memory[block.offset_bytes : end] == self.pattern(block), f"{block} was written to"
        self.allocator.deallocate(block)

    @staticmethod
    def pattern(block: Block) -> bytes:
        return (block.block_id * 2_654_435_761 % (1 << 64)).to_bytes(8, "little") * (block.size_bytes // 8)


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_patterns_in_real_memory_survive(name: str, seed: int) -> None:
    generator = random.Random(seed)
    total_bytes = (1 << 20) + generator.choice([0, 512 * 77])
    with mmap.mmap(-1, total_bytes) as memory:
        real = RealMemory(policy(name, total_bytes), memory)
        live: list[Block] = []
        for _ in range(1500):
            if live and generator.random() < 0.48:
                real.deallocate(live.pop(generator.randrange(len(live))))
                continue
            size = int(2 ** generator.uniform(0, 17))
            try:
                live.append(real.allocate(size))
            except OutOfMemory:
                real.deallocate(live.pop(0))
        assert real.allocator.stats()["allocation"]["all"][2] > 600
        for block in live:
            real.deallocate(block)


@every_policy
def test_all_memory_can_be_had_as_one_block_again_and_again(name: str) -> None:
    allocator = policy(name)
    largest = allocator.largest_free_bytes()
    for _ in range(3):
        block = allocator.allocate(largest)
        assert block.size_bytes == largest
        allocator.deallocate(block)


@every_policy
def test_small_blocks_fill_the_range_and_no_more(name: str) -> None:
    allocator = policy(name)
    live = []
    with pytest.raises(OutOfMemory) as failure:
        while True:
            live.append(allocator.allocate(512))
    assert len(live) == 64 * KIB // 512
    assert failure.value.allocated_bytes == failure.value.limit_bytes == 64 * KIB
    assert "the largest free block has 0 bytes" in str(failure.value)
    assert allocator.stats()["num_ooms"] == 1
    for block in live[::2] + live[1::2]:
        allocator.deallocate(block)
    assert allocator.allocate(allocator.largest_free_bytes()).size_bytes >= 32 * KIB


@every_policy
def test_out_of_memory_changes_nothing_and_names_the_largest_free_block(name: str) -> None:
    allocator = policy(name)
    allocator.allocate(20 * KIB)
    before = allocator.free_spans()
    with pytest.raises(OutOfMemory, match=f"{allocator.largest_free_bytes()} bytes$"):
        allocator.allocate(60 * KIB)
    assert allocator.free_spans() == before


@every_policy
def test_a_block_is_freed_once_and_by_its_own_allocator(name: str) -> None:
    allocator, twin = policy(name), policy(name)
    block, foreign = allocator.allocate(1000), twin.allocate(1000)
    with pytest.raises(UsageError, match=r"block 0 \(1000 bytes at offset \d+\) is not out"):
        allocator.deallocate(foreign)
    allocator.deallocate(block)
    with pytest.raises(UsageError, match="freed already"):
        allocator.deallocate(block)
    empty = allocator.allocate(0)
    allocator.deallocate(empty)
    with pytest.raises(UsageError):
        allocator.deallocate(empty)
    check(allocator, [])


@every_policy
def test_an_empty_block_holds_no_memory(name: str) -> None:
    allocator = policy(name)
    block = allocator.allocate(0, stream=3)
    assert (block.address, block.size_bytes, block.region, block.stream) == (0, 0, -1, 3)
    assert allocator.stats()["allocated_bytes"]["all"] == [0, 0, 0, 0]


@every_policy
def test_the_books_count_both_ways(name: str) -> None:
    allocator = policy(name)
    first, second = allocator.allocate(512), allocator.allocate(512)
    allocator.deallocate(first)
    allocator.deallocate(second)
    allocator.allocate(512)
    stats = allocator.stats()
    assert stats["requested_bytes"]["all"] == [512, 1024, 1536, 1024]
    assert stats["allocated_bytes"]["all"] == [512, 1024, 1536, 1024]
    assert stats["reserved_bytes"]["all"] == [64 * KIB, 64 * KIB, 64 * KIB, 0]


@every_policy
@pytest.mark.parametrize(
    ("total_bytes", "alignment_bytes", "words"),
    [(0, 512, "total_bytes=0"), (511, 512, "at least one block"), (4096, 0, "alignment_bytes=0")],
)
def test_impossible_ranges_are_refused(name: str, total_bytes: int, alignment_bytes: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        policy(name, total_bytes, alignment_bytes)


@every_policy
def test_a_negative_size_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="negative"):
        policy(name).allocate(-1)


@every_policy
def test_the_same_program_gives_the_same_places(name: str) -> None:
    def places() -> list[int]:
        allocator, generator = policy(name, 1 << 20), random.Random(5)
        live: list[Block] = []
        offsets = []
        for _ in range(400):
            if live and generator.random() < 0.45:
                allocator.deallocate(live.pop(generator.randrange(len(live))))
            else:
                live.append(allocator.allocate(generator.randrange(1, 5000)))
                offsets.append(live[-1].offset_bytes)
        return offsets

    assert places() == places()
