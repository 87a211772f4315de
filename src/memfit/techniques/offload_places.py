"""Where offloaded bytes go: pinned host memory from a pool, or a file that no crash can leave behind."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.core.errors import UsageError

SLAB_BYTES = 64 << 20
_ALIGNMENT = 512


class PinnedPool:
    """Pinned host memory in slabs, whose pieces are used again.

    Pinning takes milliseconds a call, so it is done for slabs only, and a training asks for the same sizes in
    every step: after the first, all are served from the pool.

    Args:
        slab_bytes: what is pinned at a time; larger pieces get a slab of their own.
        pinned: ``False`` for ordinary memory, where there is no GPU.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES, *, pinned: bool = True) -> None:
        self._slab_bytes, self._pinned = slab_bytes, pinned
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.slab_count = 0
        self.held_bytes = 0

    def take(self, size_bytes: int) -> tuple[Tensor, Any]:
        """A piece (uint8), and the event after which it may be written to (``None``: at once)."""
        size = -(-max(size_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._free[size]:
                piece, event = self._free[size].pop()
                return piece[:size_bytes], event
            if size > self._slab_bytes:
                return self._new_slab(size)[:size_bytes], None
            if self._slab.numel() < size:
                self._slab = self._new_slab(self._slab_bytes)
            piece, self._slab = self._slab[:size], self._slab[size:]
            return piece[:size_bytes], None

    def give_back(self, piece: Tensor, event: Any = None) -> None:
        """Takes a piece back; ``event`` is the end of the last copy that reads it."""
        size = -(-max(piece.numel(), 1) // _ALIGNMENT) * _ALIGNMENT
        whole = piece.as_strided((size,), (1,), piece.storage_offset())
        with self._lock:
            self._free[size].append((whole, event))

    def _new_slab(self, size_bytes: int) -> Tensor:
        self.slab_count += 1
        self.held_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)


class SpillFile:
    """A file for the bytes of tensors, whose ranges are used again.

    On POSIX it has no name from the start, so it is gone when its process is, however that ends.

    Args:
        folder: where; the system's folder for temporary files by default (which may be in memory: see
            ``df``).

    Raises:
        UsageError: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix="memfit-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"cannot make a file in {folder}: {error.strerror}; choose another folder"
            ) from error
        weakref.finalize(self, self._file.close)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self.size_bytes = 0

    def write(self, data: Tensor) -> int:
        """Writes the bytes (uint8, host memory); gives back where they are."""
        size = data.numel()
        with self._lock:
            if self._free[size]:
                place = self._free[size].pop()
            else:
                place, self.size_bytes = self.size_bytes, self.size_bytes + size
        view, done = data.numpy().data, 0
        while done < size:
            done += self._write_some(view[done:], place + done)
        return place

    def read(self, place: int, into: Tensor) -> None:
        """Fills ``into`` (uint8, host memory) with what was written at ``place``."""
        view, done = into.numpy().data, 0
        while done < into.numel():
            count = self._read_some(view[done:], place + done)
            if count == 0:
                raise UsageError("the file of offloaded tensors was cut off by another program")
            done += count

    def read_ahead(self, place: int, size_bytes: int) -> None:
        """Lets the system fetch a range in the background, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), place, size_bytes, os.POSIX_FADV_WILLNEED)

    def free(self, place: int, size_bytes: int) -> None:
        """Gives a range back."""
        with self._lock:
            self._free[size_bytes].append(place)

    def _write_some(self, view: memoryview, place: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), view, place)
        with self._lock:
            self._file.seek(place)
            return int(self._file.write(view))

    def _read_some(self, view: memoryview, place: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], place)
        with self._lock:
            self._file.seek(place)
            return int(self._file.readinto(view))
