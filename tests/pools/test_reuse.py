"""Blocks that were just freed: handed out again by size, and never in the way of anything else."""

from __future__ import annotations

import gc
import random

import torch

from memfit.allocators import ALLOCATORS, Block
from memfit.pools import MemoryPool

KIB, MIB = 1 << 10, 1 << 20


class _Asked(ALLOCATORS["best_fit"]):  # type: ignore[misc]
    """A policy of a user's own, which counts what it is asked."""

    asked = 0

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        type(self).asked += 1
        return super().allocate(size_bytes, stream=stream)


def test_a_freed_block_serves_the_next_of_its_size() -> None:
    pool = MemoryPool(MIB, device="cpu")
    held = [pool.allocate(16 * KIB) for _ in range(4)]
    addresses = [handle.address for handle in held]
    for handle in held:
        pool.deallocate(handle)
    again = [pool.allocate(16 * KIB).address for _ in range(3)]
    assert set(again) == {addresses[-1]}, "each was gone before the next was asked for"
    assert pool.statistics().allocations == 7


def test_freed_blocks_are_joined_before_anything_is_refused_or_taken() -> None:
    pool = MemoryPool(MIB, max_size=MIB, device="cpu")
    for _ in range(3):
        held = [pool.allocate(64 * KIB) for _ in range(16)]
        del held
        whole = pool.allocate(MIB)
        assert pool.statistics().chunks == 1
        del whole
    held = [pool.allocate(64 * KIB) for _ in range(16)]
    del held
    found = pool.statistics()
    assert (found.largest_free_bytes, found.allocated_bytes, found.blocks) == (MIB, 0, 0)
    held = [pool.allocate(64 * KIB) for _ in range(16)]
    del held
    assert pool.trim() == MIB


def test_a_policy_of_ones_own_is_asked_each_time() -> None:
    pool = MemoryPool(MIB, device="cpu", allocation_policy=_Asked)
    for _ in range(5):
        pool.empty(100)
    assert _Asked.asked == 5


def test_a_plan_comes_before_freed_blocks() -> None:
    pool = MemoryPool(MIB, device="cpu")

    def step() -> None:
        first = pool.empty(1000)
        pool.empty(1000)
        del first

    with pool.record_step() as recording:
        step()
    step()
    with pool.serve(recording.plan()) as served:
        for _ in range(3):
            pool.empty(5)  # beyond the plan
            served.begin_step()
            step()
        assert served.served == 6
    step()
    assert served.served == 6


def test_no_two_live_tensors_share_a_byte() -> None:
    """Random lifetimes over few sizes: what is written stays until it is freed."""
    dice, pool = random.Random(4), MemoryPool(MIB, device="cpu")
    live: list[tuple[torch.Tensor, int]] = []
    for turn in range(1500):
        if live and dice.random() < 0.5:
            tensor, mark = live.pop(dice.randrange(len(live)))
            assert bool((tensor == mark).all())
        else:
            tensor = pool.empty(dice.choice((64, 64, 256, 1000, 9000)), dtype=torch.int16)
            live.append((tensor.fill_(turn), turn))
    del live, tensor
    gc.collect()
    assert pool.statistics().blocks == 0
