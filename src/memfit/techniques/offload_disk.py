"""Moves contents between a device and a file while the device goes on computing.

From the CPU they are written at once, to what the system writes out later, and read by mapping the file. From
CUDA they go through pinned memory: a copy on a stream of its own and a thread that writes; on the way back a
thread that reads ahead of their use, and a copy on a third stream.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.techniques.codecs.base import from_bytes, raw_bytes
from memfit.techniques.offload_places import Spilled, SpillFile
from memfit.techniques.offload_transfer import IN_FLIGHT_BYTES, Nothing, OnHost, ToHost

if TYPE_CHECKING:
    from memfit.techniques.saved_tensors import Kept, Place


class ToDisk(ToHost):
    """A keeper that writes to a file."""

    def __init__(self, min_elements: int, ahead: int, folder: str | os.PathLike[str] | None) -> None:
        super().__init__(min_elements, ahead)
        self._folder = folder
        self.file = SpillFile(folder)
        self._threads: tuple[Executor, Executor] | None = None
        self._unwritten: deque[tuple[Future[Spilled], int]] = deque()

    def __reduce__(self) -> tuple[type[ToDisk], tuple[Any, ...]]:
        return ToDisk, (self.min_elements, self.order.ahead, self._folder)

    def keep(self, flat: Tensor, place: Place) -> Kept | None:
        """Writes the contents, or starts to."""
        if flat.device.type == "meta":
            return Nothing(flat)
        return _ThroughHost(self, flat) if flat.device.type == self.device_type else _OnDisk(self, flat)

    @property
    def threads(self) -> tuple[Executor, Executor]:
        """One that writes, and one that reads."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "memfit-write"), ThreadPoolExecutor(1, "memfit-read")
        return self._threads

    def write(self, piece: Tensor, dtype: torch.dtype, done: Any) -> Future[Spilled]:
        """Writes a piece of pinned memory once it has arrived, and gives it back to the pool.

        Waits for the oldest while there is more than `IN_FLIGHT_BYTES` to be written.
        """

        def written() -> Spilled:
            done.synchronize()
            try:
                return self.file.write(from_bytes(piece, dtype))
            finally:
                self.pool.give_back(piece)

        self._unwritten.append((self.threads[0].submit(written), piece.numel()))
        found = self._unwritten[-1][0]
        while self._unwritten and (
            self._unwritten[0][0].done() or sum(size for _, size in self._unwritten) > IN_FLIGHT_BYTES
        ):
            self._unwritten.popleft()[0].result()
        return found


class _OnDisk:
    """Contents of the host's, in a file."""

    def __init__(self, keeper: ToDisk, flat: Tensor) -> None:
        self._keeper, self._device = keeper, flat.device
        self._spilled = keeper.file.write(flat.cpu())
        self._number = keeper.order.add(self)

    def flat(self) -> Tensor:
        for member in self._keeper.order.before(self._number):
            member.ahead()
        return self._spilled.read().to(self._device)

    def ahead(self) -> None:
        """Lets the system read it in the background."""
        self._spilled.read_ahead()


class _ThroughHost(OnHost):
    """Contents of a device's, in a file or on their way there or back."""

    def __init__(self, keeper: ToDisk, flat: Tensor) -> None:
        super().__init__(keeper, flat)
        self._disk = keeper
        self._spilled = keeper.write(self.piece, flat.dtype, self.done)

    def fetch(self) -> None:
        """Starts to read, and then to copy back, unless it is under way."""
        if self.back is not None:
            return
        numel, dtype, device = self.like
        compute, (_, back) = torch.cuda.current_stream(device), self._disk.streams(device)
        tensor, before = torch.empty(numel, dtype=dtype, device=device), compute.record_event()
        spilled, pool = self._spilled, self._disk.pool

        def fetched() -> Any:
            contents = raw_bytes(spilled.result().read())
            piece, free = pool.take(contents.numel())
            if free is not None:
                free.synchronize()
            piece.copy_(contents)
            back.wait_event(before)
            with torch.cuda.stream(back):
                raw_bytes(tensor).copy_(piece, non_blocking=True)
            ready = back.record_event()
            pool.give_back(piece, ready)
            return ready

        self.back = tensor, self._disk.threads[1].submit(fetched).result

    def give_back(self) -> None:
        """The pieces go back by themselves."""
