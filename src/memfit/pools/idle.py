"""Giving cached memory back to the device when nobody is waiting: in idle windows, never in a hot loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, parse_bytes
from memfit.pools.pool import MemoryPool


class CachedMemory(Protocol):
    """Memory that is held and not used, and that can be given back."""

    def cached_bytes(self) -> int:
        """What could be given back, at most."""

    def release(self) -> int:
        """Give it back; the bytes that were."""


@dataclass(frozen=True, kw_only=True)
class TorchCudaCache:
    """The cache of torch's CUDA allocator; nothing where there is no CUDA, or it is not in use yet."""

    device: int | None = None

    def cached_bytes(self) -> int:
        if not torch.cuda.is_initialized():
            return 0
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def release(self) -> int:
        if not torch.cuda.is_initialized():
            return 0
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)


@dataclass(frozen=True, kw_only=True)
class PoolCache:
    """The free chunks of a pool, but for ``keep_bytes``."""

    pool: MemoryPool
    keep_bytes: int = 0

    def cached_bytes(self) -> int:
        statistics = self.pool.statistics()
        return max(0, statistics.reserved_bytes - max(statistics.allocated_bytes, self.keep_bytes))

    def release(self) -> int:
        return self.pool.trim(keep=self.keep_bytes)


class IdleCacheRelease:
    """Gives cached memory back once work has rested for a while.

    Emptying a cache in a training loop costs more than it gives: the device is synchronised, and the next
    step takes all again. So work says `busy` (once per step is enough), and memory is given back by `poll`
    only when the last of that is ``idle_seconds`` ago, at most once per rest, and not for less than
    ``least``. `start` polls from a thread; a loop of one's own can call `poll` instead.

    Args:
        cache: what is given back; torch's CUDA cache if not given. A `MemoryPool` may be given itself.
        idle_seconds: how long work must have rested.
        least: what it must be worth.
        clock: seconds, monotonic; for tests.

    Examples:
        >>> from memfit import MemoryPool
        >>> now = 0.0
        >>> pool = MemoryPool(pool_size="1MiB", device="cpu")
        >>> release = IdleCacheRelease(pool, idle_seconds=10, least=0, clock=lambda: now)
        >>> release.busy(); now = 5.0; release.poll()
        0
        >>> now = 11.0; release.poll()
        1048576
    """

    def __init__(
        self,
        cache: CachedMemory | MemoryPool | None = None,
        *,
        idle_seconds: float = 30.0,
        least: str | int = "64MiB",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not idle_seconds > 0:
            raise UsageError(f"idle_seconds={idle_seconds!r}: a rest takes some time; give more than 0")
        if isinstance(cache, MemoryPool):
            cache = PoolCache(pool=cache)
        self._cache: CachedMemory = TorchCudaCache() if cache is None else cache
        self._idle_seconds = idle_seconds
        self._least_bytes = parse_bytes(least, what="least")
        self._clock = clock
        self._last_busy = clock()
        self._released_since = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.released_bytes = 0
        self.releases = 0

    def busy(self) -> None:
        """Work goes on: nothing is given back for a while. Costs next to nothing."""
        self._last_busy = self._clock()
        self._released_since = False

    def poll(self) -> int:
        """Give the cache back if work rests; the bytes that were given back."""
        with self._lock:
            if self._released_since or self._clock() - self._last_busy < self._idle_seconds:
                return 0
            if self._cache.cached_bytes() < max(self._least_bytes, 1):
                return 0
            released = self._cache.release()
            self._released_since = True
            self.releases += 1
            self.released_bytes += released
            return released

    def start(self) -> IdleCacheRelease:
        """Poll from a thread of its own from now on.

        Raises:
            UsageError: it does so already.
        """
        if self._thread is not None:
            raise UsageError("this IdleCacheRelease has been started already: stop() it first")
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="memfit-idle-release", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread, and wait for it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> IdleCacheRelease:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<IdleCacheRelease, {format_bytes(self.released_bytes)} given back in {self.releases} rests>"

    def _run(self) -> None:
        while not self._stop.wait(self._idle_seconds / 2):
            self.poll()
