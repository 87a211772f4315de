"""Eight threads at one pool: every block holds the pattern of the one who has it, until the end."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from memfit.core.errors import UsageError
from memfit.pools import DynamicAllocation, MemoryPool, OutOfPoolMemory

from .policies import NaiveFirstFit

THREADS = 8
ROUNDS = 250
Maker = Callable[..., MemoryPool]


class Worker(threading.Thread):
    """Allocates, writes, checks and frees in every way there is."""

    def __init__(self, pool: MemoryPool, number: int, start: threading.Barrier) -> None:
        super().__init__()
        self.pool, self.number, self.barrier = pool, number, start
        self.random = random.Random(number)
        self.held: list[tuple[Any, Any, int]] = []  # handle or None, tensor or None, pattern
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.barrier.wait()
            for step in range(ROUNDS):
                self.act(step)
            for entry in self.held:
                self.check(*entry)
            self.held.clear()
        except BaseException as failure:
            self.failure = failure

    def act(self, step: int) -> None:
        if len(self.held) > 6 or (self.held and self.random.random() < 0.4):
            self.let_go(*self.held.pop(self.random.randrange(len(self.held))))
            return
        pattern = (self.number * 31 + step) % 251
        try:
            if self.random.random() < 0.5:
                handle = self.pool.allocate(self.random.choice((100, 1000, 5000)))
                handle.tensor().fill_(pattern)
                self.held.append((handle, None, pattern))
            else:
                tensor = self.pool.empty(self.random.choice((10, 700)), dtype=None).fill_(float(pattern))
                self.held.append((None, tensor, pattern))
        except OutOfPoolMemory:
            if self.held:
                self.let_go(*self.held.pop())
        if step % 40 == self.number:
            self.pool.defragment()
        if step % 60 == self.number:
            self.pool.trim("32KiB")
        if step % 100 == self.number:
            gc.collect()

    def check(self, handle: Any, tensor: Any, pattern: int) -> None:
        seen = handle.tensor() if tensor is None else tensor
        assert bool((seen == pattern).all()), "a block holds somebody else's bytes"

    def let_go(self, handle: Any, tensor: Any, pattern: int) -> None:
        self.check(handle, tensor, pattern)
        if handle is not None and self.random.random() < 0.7:
            self.pool.deallocate(handle)


@pytest.mark.parametrize("policy", [NaiveFirstFit, DynamicAllocation], ids=lambda policy: policy.__name__)
def test_eight_threads(make_pool: Maker, policy: Any) -> None:
    pool = make_pool("64KiB", chunk_size="64KiB", max_size="256KiB", allocation_policy=policy)
    start = threading.Barrier(THREADS)
    workers = [Worker(pool, number, start) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failures = [worker.failure for worker in workers if worker.failure]
    assert not failures, failures
    statistics = pool.statistics()
    assert statistics.blocks == 0
    assert statistics.allocations == statistics.frees > THREADS * 50


def test_one_free_of_many_wins(make_pool: Maker) -> None:
    pool = make_pool()
    handles = [pool.allocate(100) for _ in range(50)]
    double_frees: list[int] = []
    start = threading.Barrier(THREADS)

    def free_all() -> None:
        start.wait()
        for index, handle in enumerate(handles):
            try:
                pool.deallocate(handle)
            except UsageError:
                double_frees.append(index)

    threads = [threading.Thread(target=free_all) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(double_frees) == sorted(list(range(50)) * (THREADS - 1))
    assert pool.statistics().frees == 50
