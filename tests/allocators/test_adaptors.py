"""Adaptors: they change only what they are for, around every policy, and stack."""

from __future__ import annotations

import io
import json
import random

import pytest

from memfit.allocators import ALLOCATORS, AddressSpaceConfig, BaseAllocator, CachingConfig
from memfit.allocators.adaptors import CountedAllocator, LimitedAllocator, LoggedAllocator
from memfit.allocators.base import Block, OutOfMemory
from memfit.allocators.comparison import run_policy
from memfit.allocators.replay import parse_operations, replay
from memfit.core.errors import UsageError

MIB = 1 << 20
every_policy = pytest.mark.parametrize("name", list(ALLOCATORS))


def made(name: str, total_bytes: int = 64 * MIB) -> BaseAllocator:
    config = CachingConfig if name == "caching" else AddressSpaceConfig
    return ALLOCATORS[name](config(total_bytes=total_bytes))


class Plain(BaseAllocator):
    """Knows of no stream, and keeps no books."""

    def __init__(self) -> None:
        super().__init__()
        self.top = 0

    def allocate(self, size):  # type: ignore[no-untyped-def, override]
        self.top += size
        return Block(
            block_id=self.top,
            address=self.top,
            size_bytes=size,
            requested_bytes=size,
            offset_bytes=self.top - size,
        )

    def deallocate(self, block: Block) -> None:
        pass


def drive(allocator: BaseAllocator, steps: int = 300) -> list[int]:
    """A random program; the addresses that it got, -1 where memory was out."""
    generator = random.Random(1)
    live: list[Block] = []
    addresses = []
    for _ in range(steps):
        if live and generator.random() < 0.45:
            allocator.deallocate(live.pop(generator.randrange(len(live))))
            continue
        try:
            live.append(allocator.allocate(generator.randrange(1, MIB)))
            addresses.append(live[-1].address)
        except OutOfMemory:
            addresses.append(-1)
    return addresses


@every_policy
def test_adaptors_change_no_place(name: str) -> None:
    log = io.StringIO()
    wrapped = LimitedAllocator(LoggedAllocator(CountedAllocator(made(name)), log), limit_bytes=1 << 40)
    assert drive(wrapped) == drive(made(name))
    assert wrapped.stats()["requested_bytes"] == wrapped.inner.stats()["requested_bytes"]


@every_policy
def test_the_limit_is_kept_and_what_is_over_it_is_given_back(name: str) -> None:
    allocator = LimitedAllocator(made(name), limit_bytes=3 * MIB)
    live: list[Block] = []
    with pytest.raises(OutOfMemory) as failure:
        while True:
            live.append(allocator.allocate(MIB))
    assert len(live) >= 2
    assert (failure.value.limit_bytes, failure.value.allocated_bytes) == (3 * MIB, allocator.allocated_bytes)
    allocator.deallocate(live.pop())
    inside = allocator.inner.stats()["allocated_bytes"]["all"][0]
    with pytest.raises(OutOfMemory):  # fits by what is asked for, not by the block it would get
        LimitedAllocator(allocator.inner, limit_bytes=100).allocate(99)
    assert allocator.inner.stats()["allocated_bytes"]["all"][0] == inside == allocator.allocated_bytes
    live.append(allocator.allocate(MIB))


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="limit_bytes=-1"):
        LimitedAllocator(made("first_fit"), limit_bytes=-1)


def test_a_failed_free_leaves_limit_count_and_log_as_they_were() -> None:
    log = io.StringIO()
    counted = CountedAllocator(made("buddy"))
    allocator = LimitedAllocator(LoggedAllocator(counted, log), limit_bytes=MIB)
    block = allocator.allocate(1000)
    allocator.deallocate(block)
    before = log.getvalue()
    with pytest.raises(UsageError):
        allocator.deallocate(block)
    assert (allocator.allocated_bytes, counted.counts().frees, log.getvalue()) == (0, 1, before)


def test_the_log_is_what_replay_reads() -> None:
    log = io.StringIO()
    allocator = LoggedAllocator(made("caching", 256 * MIB), log)
    addresses = drive(allocator)
    lines = log.getvalue().splitlines()
    assert json.loads(lines[0]) == {"op": "config", "total_bytes": 256 * MIB}
    result = replay(parse_operations(lines))
    assert len(result.placements) == len(addresses)
    assert result.peak_requested_bytes == allocator.stats()["requested_bytes"]["all"][1]
    assert result.peak_reserved_bytes == allocator.stats()["reserved_bytes"]["all"][1]
    again = made("caching", 256 * MIB)
    listed = parse_operations(lines).operations
    assert run_policy(listed, again).served == len(addresses)


def test_what_failed_is_logged_as_freed_at_once() -> None:
    log = io.StringIO()
    allocator = LoggedAllocator(made("first_fit", MIB), log)
    with pytest.raises(OutOfMemory):
        allocator.allocate(2 * MIB, stream=1)
    allocator.allocate(5)
    with pytest.raises(UsageError):
        allocator.allocate(-1)
    assert [json.loads(line) for line in log.getvalue().splitlines()[1:]] == [
        {"op": "alloc", "id": 0, "size": 2 * MIB, "stream": 1},
        {"op": "free", "id": 0},
        {"op": "alloc", "id": 1, "size": 5, "stream": 0},
    ]


def test_counts_of_a_policy_that_keeps_none() -> None:
    allocator = CountedAllocator(Plain())
    first = allocator.allocate(100, stream=2)
    allocator.allocate(1000)
    allocator.deallocate(first)
    counts = allocator.counts()
    assert (counts.allocations, counts.frees, counts.failures) == (2, 1, 0)
    assert (counts.live_blocks, counts.peak_live_blocks) == (1, 2)
    assert (counts.requested_bytes, counts.peak_requested_bytes) == (1000, 1100)
    assert counts.sizes == {128: 1, 1024: 1}
    assert allocator.stats()["allocated_bytes"]["all"] == [1000, 1100, 1100, 100]
    assert Plain().stats() == {}


def test_failures_are_counted() -> None:
    allocator = CountedAllocator(made("first_fit", MIB))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            allocator.allocate(2 * MIB)
    assert allocator.counts().failures == 2
    assert allocator.counts().allocations == 0
