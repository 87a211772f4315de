"""The pool against a naive model: a dictionary of handles and of the bytes that each must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memfit.core.errors import UsageError
from memfit.pools import MemoryHandle, MemoryPool, OutOfPoolMemory

from .conftest import POLICIES

LIMIT_BYTES = 64 << 10
CACHING_LIMIT_BYTES = 48 << 20


class PoolMachine(RuleBasedStateMachine):
    """Anything that users may do, in any order; every block always holds what was written to it."""

    policy: Any = None

    def __init__(self) -> None:
        super().__init__()
        caching = self.policy == "caching"
        self.limit_bytes = CACHING_LIMIT_BYTES if caching else LIMIT_BYTES
        self.pool = MemoryPool(
            0 if caching else "16KiB",
            chunk_size="16KiB",
            max_size=self.limit_bytes,
            allocation_policy=self.policy,
            device="cpu",
            poison=True,
        )
        self.held: dict[MemoryHandle, int] = {}
        self.freed: list[MemoryHandle] = []
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.stamp = 0

    def chosen(self, index: int) -> MemoryHandle:
        return list(self.held)[index % len(self.held)]

    @rule(size=st.one_of(st.integers(0, 2000), st.integers(0, 40_000)))
    def allocate(self, size: int) -> None:
        try:
            handle = self.pool.allocate(size)
        except OutOfPoolMemory:
            used = self.pool.statistics().allocated_bytes
            assert used + size > self.limit_bytes // 4, "refused while three quarters are free"
            return
        self.stamp = (self.stamp + 1) % 251
        handle.tensor().fill_(self.stamp)
        self.held[handle] = self.stamp

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 1000))
    def deallocate(self, index: int) -> None:
        handle = self.chosen(index)
        del self.held[handle]
        self.pool.deallocate(handle)
        self.freed.append(handle)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 1000))
    def forget(self, index: int) -> None:
        del self.held[self.chosen(index)]

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 1000))
    def look_into(self, index: int) -> None:
        handle = self.chosen(index)
        self.tensors.append((handle.tensor(), self.held[handle]))

    @precondition(lambda self: self.tensors)
    @rule(index=st.integers(0, 1000))
    def look_away(self, index: int) -> None:
        del self.tensors[index % len(self.tensors)]

    @precondition(lambda self: self.freed)
    @rule(index=st.integers(0, 1000))
    def use_after_free(self, index: int) -> None:
        handle = self.freed[index % len(self.freed)]
        for use in (handle.tensor, lambda: self.pool.deallocate(handle)):
            with pytest.raises(UsageError, match=r"use after free|double free"):
                use()

    @rule()
    def defragment(self) -> None:
        self.pool.defragment()

    @rule(keep=st.integers(0, LIMIT_BYTES))
    def trim(self, keep: int) -> None:
        self.pool.trim(keep)

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        for handle, stamp in self.held.items():
            assert bool((handle.tensor() == stamp).all()), handle
        for tensor, stamp in self.tensors:
            assert bool((tensor == stamp).all())

    @invariant()
    def books_agree(self) -> None:
        statistics = self.pool.statistics()
        blocks = {handle.address for handle in self.held}
        requested = sum(handle.size_bytes for handle in self.held)
        only_tensors = {tensor.data_ptr() for tensor, _ in self.tensors if tensor.numel()} - blocks
        assert statistics.blocks >= len(self.held)
        assert statistics.blocks <= len(self.held) + len(self.tensors)
        assert statistics.requested_bytes >= requested
        assert statistics.blocks >= len(self.held) + len(only_tensors)
        assert statistics.requested_bytes <= statistics.allocated_bytes <= statistics.reserved_bytes or (
            statistics.requested_bytes == 0
        )
        assert statistics.reserved_bytes <= self.limit_bytes
        assert statistics.allocations - statistics.frees == statistics.blocks

    def teardown(self) -> None:
        self.held.clear()
        self.tensors.clear()
        self.freed.clear()
        assert self.pool.statistics().allocated_bytes == 0
        self.pool.trim()
        assert self.pool.statistics().reserved_bytes == 0
        self.pool.close()


@pytest.mark.parametrize("chosen", POLICIES, ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_the_pool_is_what_the_model_says(chosen: Any) -> None:
    machine = type("Machine", (PoolMachine,), {"policy": chosen})
    case = machine.TestCase
    case.settings = settings(
        max_examples=12,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
