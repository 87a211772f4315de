"""A pool of real memory: taken from the device once, carved into tensors, used again and again."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, parse_bytes
from memfit.pools.arena import Arena
from memfit.pools.compaction import Defragmentation
from memfit.pools.handles import MemoryHandle, Pin
from memfit.pools.holdings import Ended, Holder, Holding, holders_of
from memfit.pools.memory import ALIGNMENTS_BYTES, NoSystemMemory, elements, usable_device
from memfit.pools.plans import PlannedPolicy, Recorder, StepPlan
from memfit.pools.poison import Poison
from memfit.pools.policies import PolicyName, find_policy
from memfit.pools.served import ServedPlan, StepRecording
from memfit.pools.sites import calling_site
from memfit.pools.sizes import PoolSizes
from memfit.pools.statistics import PoolStatistics
from memfit.pools.streams import PoolStream


class MemoryPool:
    """Real memory that is taken from the device ahead, and handed out in blocks by an allocation policy.

    The pool grows by chunks when it is full and a chunk may still be had; what is free can be given back with
    `trim` and brought together with `defragment`. Blocks come back by `deallocate`, and by themselves when
    neither their handle nor a tensor that looks into them can be reached any more. All methods may be called
    from several threads.

    Args:
        pool_size: what to take at once, with pages behind it; ``"1GiB"`` or bytes.
        chunk_size: what the pool is taken, grown and trimmed by. If not given, ``pool_size`` is one chunk,
            and the pool grows by as much (64 MiB if it begins empty).
        max_size: the most to ever take; None: what the device has.
        allocation_policy: a name of ``memfit.allocators.ALLOCATORS``, or a subclass of `BaseAllocator`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; the current CUDA device, or the CPU, if not given.
        poison: fill free memory with a pattern and look at it before it is used again, which finds what
            writes there past all handles (C code, raw pointers); slow.
        name: for messages.

    Raises:
        UsageError: sizes that exclude each other, an unknown policy or device.
        CannotRunHere: CUDA is asked for where there is none.
        OutOfPoolMemory: the device has not that much.

    Examples:
        >>> pool = MemoryPool(pool_size="4MiB", device="cpu")
        >>> handle = pool.allocate("1MiB")
        >>> handle.tensor(torch.float32, (512, 512)).zero_().shape
        torch.Size([512, 512])
        >>> pool.deallocate(handle)
        >>> pool.statistics().allocated_bytes
        0
    """

    def __init__(
        self,
        pool_size: str | int = 0,
        *,
        chunk_size: str | int | None = None,
        max_size: str | int | None = None,
        allocation_policy: PolicyName = "best_fit",
        device: str | torch.device | None = None,
        poison: bool = False,
        name: str = "MemoryPool",
    ) -> None:
        self.name = name
        self.device = usable_device(device)
        self.closed = False
        alignment_bytes = ALIGNMENTS_BYTES[self.device.type]
        sizes = PoolSizes.read(pool_size, chunk_size, max_size, alignment_bytes=alignment_bytes)
        self._stream = PoolStream(self.device)
        self._lock = threading.Lock()
        self._open = _Open(self)
        self._ended = Ended(self._settle_if_idle)
        self._arena = Arena(
            name=name,
            device=self.device,
            policy=find_policy(allocation_policy),
            alignment_bytes=alignment_bytes,
            chunk_bytes=sizes.chunk_bytes,
            max_bytes=sizes.max_bytes,
            ended=self._ended,
            poison=Poison() if poison else None,
        )
        if sizes.first_bytes:
            self.grow(sizes.first_bytes)

    # Blocks.

    def allocate(self, size: str | int) -> MemoryHandle:
        """Hand out a block of ``size`` bytes; text like ``"1GB"`` is a size too.

        Raises:
            OutOfPoolMemory: no room; the message says what is free and who holds the rest.
            UsageError: not a size; the pool is closed; or, on CUDA, another stream than its own is current.
        """
        requested = size if type(size) is int and size >= 0 else parse_bytes(size)
        site = calling_site()
        with self._open:
            lease = self._arena.take(requested, site)
        return MemoryHandle(self, lease, requested, site)

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in a block of its own, not initialised; the block is free when the tensor and all that
        views it are gone.

        Raises:
            OutOfPoolMemory: no room.
        """
        return self.carve(shape, torch.get_default_dtype() if dtype is None else dtype)[0]

    def carve(self, shape: int | Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Holding]:
        """As `empty`, with the pool's record of the block."""
        sizes, size_bytes = elements(shape if isinstance(shape, int) else tuple(shape), dtype)
        site = calling_site()
        with self._open:
            pin = self._arena.take(size_bytes, site).new_pin()
        holding = pin.lease.holding
        return holding.chunk.memory.tensor(holding.offset_bytes, dtype, sizes, pin), holding

    def deallocate(self, handle: MemoryHandle) -> None:
        """Take a block back. Tensors and buffers that look into it stay valid: the block is free when the
        last of them is gone, and waits till then (`PoolStatistics.waiting_bytes`).

        Raises:
            UsageError: freed before, or of another pool.
        """
        if handle._pool is not self:
            raise UsageError(f"{handle!r} is of {handle._pool!r}, not of {self!r}")
        with self._open:
            lease = handle._lease
            if lease is None:
                raise UsageError(
                    f"double free: the block of {format_bytes(handle.size_bytes)} allocated at {handle.site}"
                    f" was deallocated at {handle._freed_at} already"
                )
            handle._freed_at = lease.holding.freed_at = calling_site()
            handle._lease = None
        del lease  # where nothing looks into the block, this was its last reference and gives it back

    # The pool.

    def grow(self, size: str | int) -> None:
        """Take that much more from the device now, in chunks, with pages behind them.

        Raises:
            OutOfPoolMemory: past the limit, or more than the device has; nothing is taken then.
        """
        arena = self._arena
        wanted = arena.whole_units(parse_bytes(size))
        with self._open:
            room = arena.room_bytes()
            if room is not None and wanted > room:
                raise arena.out_of_memory(wanted)
            taken = []
            try:
                for start in range(0, wanted, arena.chunk_bytes):
                    taken.append(arena.grow(min(arena.chunk_bytes, wanted - start), touch=True))
            except NoSystemMemory as error:
                for chunk in taken:
                    arena.chunks.remove(chunk)
                raise arena.out_of_memory(wanted) from error

    def trim(self, keep: str | int = 0) -> int:
        """Give empty chunks back to the device as long as ``keep`` bytes stay reserved.

        Returns:
            The bytes given back.
        """
        kept = parse_bytes(keep, what="keep")
        with self._open:
            self._arena.settle()
            return self._arena.chunks.drop_empty(keeping_bytes=kept)

    def defragment(self) -> Defragmentation:
        """Move blocks together so that what is free is in one piece. Handles give the new place from now on;
        a block that a tensor looks into stays where it is."""
        with self._open, self._stream.current():
            self._arena.settle()
            return self._arena.defragment()

    def statistics(self) -> PoolStatistics:
        """What is reserved, allocated and free now, peaks and counts."""
        with self._lock:
            self._arena.settle()
            return self._arena.statistics()

    def holders(self) -> tuple[Holder, ...]:
        """Which lines of code hold how much, most first."""
        with self._lock:
            self._arena.settle()
            return holders_of(self._arena.live.values())

    def close(self) -> None:
        """Give the memory back. Handles are dead from now on; what tensors look into lives as they do."""
        with self._lock:
            self.closed = True
            self._arena.close()

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        arena = self._arena
        reserved, used = format_bytes(arena.chunks.reserved_bytes), format_bytes(arena.counts.allocated_bytes)
        return f"<{self.name} on {self.device}, {arena.chunks.policy.name}, {used} of {reserved} allocated>"

    # A step that repeats.

    @contextlib.contextmanager
    def record_step(self) -> Iterator[StepRecording]:
        """Record what is allocated and freed inside of the ``with`` block, to make a plan of it.

        Examples:
            >>> pool = MemoryPool(pool_size="1MiB", device="cpu")
            >>> with pool.record_step() as recording:
            ...     total = pool.empty(1000).fill_(1.0).sum()
            >>> with pool.serve(recording.plan()) as served:
            ...     served.begin_step()
            ...     total = pool.empty(1000).fill_(1.0).sum()
            >>> served.served
            1

        Raises:
            UsageError: another recording is under way.
        """
        arena, recorder = self._arena, Recorder()
        with self._open:
            if arena.recorder is not None:
                raise UsageError(f"{self.name} is recording a step already: end that recording first")
            arena.settle()
            arena.recorder = recorder
        try:
            yield StepRecording(recorder, arena.alignment_bytes)
        finally:
            with self._lock:
                arena.settle()
                arena.recorder = None

    def serve(self, plan: StepPlan | Iterable[tuple[int, int]]) -> ServedPlan:
        """Serve steps that repeat from fixed places. What a step asks for beyond its plan, or in another
        order, is served by the pool's policy as ever.

        Args:
            plan: of `record_step`, or ``(size_bytes, offset_bytes)`` of each allocation in order.

        Raises:
            OutOfPoolMemory: no room for the memory of the plan.
            UsageError: offsets that the device cannot use.
        """
        arena = self._arena
        found = plan if isinstance(plan, StepPlan) else StepPlan.of(plan)
        policy = PlannedPolicy(found, alignment_bytes=arena.alignment_bytes)
        with self._open:
            arena.settle()
            return ServedPlan(self, policy, arena)

    def locked(self) -> threading.Lock:
        """The pool at rest, for the duration of a ``with`` block; for its parts."""
        return self._lock

    # What handles ask for.

    def tensor_of(self, handle: MemoryHandle, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the first bytes of a handle's block, which keeps the block."""
        holding, pin = self._pinned(handle)
        return holding.chunk.memory.tensor(holding.offset_bytes, dtype, sizes, pin)

    def buffer_of(self, handle: MemoryHandle) -> memoryview:
        """All bytes of a handle's block, as a buffer that keeps the block."""
        holding, pin = self._pinned(handle)
        return holding.chunk.memory.buffer(holding.offset_bytes, handle.size_bytes, pin)

    def record_stream(self, handle: MemoryHandle, stream: Any) -> None:
        """See `MemoryHandle.record_stream`."""
        with self._open:
            holding = handle.lease().holding
            holding.streams = [*(holding.streams or []), stream]

    def _pinned(self, handle: MemoryHandle) -> tuple[Holding, Pin]:
        """A handle's block, which does not move from now on as long as the pin is held."""
        with self._lock:
            lease = handle.lease()
            return lease.holding, lease.new_pin()

    def _settle_if_idle(self) -> None:
        """A lease has died: take its block back, unless the pool is at work, which will do so itself."""
        if self._lock.acquire(blocking=False):
            try:
                self._arena.take_back_ended()
            finally:
                self._lock.release()


class _Open:
    """The lock of a pool that is open, with its stream current; one for all `with` blocks of the pool.

    Raises:
        UsageError: the pool is closed, or another stream is current.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = weakref.ref(pool)
        self._lock = pool._lock
        self._stream = pool._stream

    def __enter__(self) -> None:
        self._stream.check()
        self._lock.acquire()
        pool = self._pool()
        if pool is None or pool.closed:
            self._lock.release()
            raise UsageError(f"{pool.name if pool else 'the pool'} is closed: its memory has been given back")

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
