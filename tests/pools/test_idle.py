"""Cached memory is given back in rests, and at no other time; the clock is the test's."""

from __future__ import annotations

import threading

import pytest

from memfit.core.errors import UsageError
from memfit.pools import IdleCacheRelease, MemoryPool, TorchCudaCache

from .policies import NaiveFirstFit

MIB = 1 << 20


class Clock:
    """Time that passes when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeCache:
    """So many bytes, and how often they were given back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.released: list[int] = []
        self.event = threading.Event()

    def cached_bytes(self) -> int:
        return self.size_bytes

    def release(self) -> int:
        self.released.append(self.size_bytes)
        self.event.set()
        return self.size_bytes


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_hot_loop_is_never_interrupted(clock: Clock) -> None:
    cache = FakeCache(100 * MIB)
    release = IdleCacheRelease(cache, idle_seconds=10, clock=clock)
    for _ in range(1000):
        clock.now += 9.9
        assert release.poll() == 0
        release.busy()
    assert not cache.released


def test_once_per_rest(clock: Clock) -> None:
    cache = FakeCache(100 * MIB)
    release = IdleCacheRelease(cache, idle_seconds=10, clock=clock)
    clock.now += 10
    assert [release.poll() for _ in range(3)] == [100 * MIB, 0, 0]
    release.busy()
    clock.now += 9
    assert release.poll() == 0
    clock.now += 1
    assert release.poll() == 100 * MIB
    assert repr(release) == "<IdleCacheRelease, 200.00 MiB given back in 2 rests>"


def test_not_for_little(clock: Clock) -> None:
    cache = FakeCache(63 * MIB)
    release = IdleCacheRelease(cache, idle_seconds=10, least="64MiB", clock=clock)
    clock.now += 100
    assert release.poll() == 0
    cache.size_bytes = 64 * MIB
    assert release.poll() == 64 * MIB


def test_a_pool_is_trimmed(clock: Clock) -> None:
    pool = MemoryPool("4MiB", chunk_size="1MiB", device="cpu", allocation_policy=NaiveFirstFit)
    handle = pool.allocate(100)
    release = IdleCacheRelease(pool, idle_seconds=10, least="1MiB", clock=clock)
    clock.now += 11
    assert release.poll() == 3 * MIB
    assert handle.tensor().shape == (100,)


def test_the_thread_polls_and_ends() -> None:
    cache = FakeCache(100 * MIB)
    with IdleCacheRelease(cache, idle_seconds=0.01) as release:
        assert cache.event.wait(timeout=60)
        with pytest.raises(UsageError, match="started already"):
            release.start()
    assert len(cache.released) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "memfit-idle-release"]
    release.stop()


def test_cuda_is_not_woken(clock: Clock) -> None:
    import torch

    cache = TorchCudaCache()
    if not torch.cuda.is_initialized():
        assert (cache.cached_bytes(), cache.release()) == (0, 0)
        assert not torch.cuda.is_initialized()


def test_a_rest_takes_time() -> None:
    with pytest.raises(UsageError, match="idle_seconds=0"):
        IdleCacheRelease(idle_seconds=0)
