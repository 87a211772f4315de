"""Where offloaded bytes go: pinned host memory from a pool, or ranges of a file."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.techniques.offload_files import HEADER_BYTES, Slot, TensorFile

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
    """A file for the contents of tensors (`TensorFile`), whose ranges are used again: a training asks for
    the same ones in every step.

    Args:
        folder: where; the system's folder for temporary files by default.
        technique: who asks, for the errors.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, technique: str = "activation_offload"
    ) -> None:
        self._folder, self._technique = folder, technique
        self._files = [TensorFile(folder, technique)]
        self._free: dict[tuple[int, torch.dtype], list[_Place]] = defaultdict(list)
        self._lock = threading.RLock()  # a range may end while another is written
        self._count = self._used = 0

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """One, but for more tensors than a header has room for."""
        return tuple(self._files)

    @property
    def size_bytes(self) -> int:
        """Of all tensors that were written, less what was written over."""
        return sum(file.end - 8 - HEADER_BYTES for file in self._files)

    def write(self, flat: Tensor) -> Spilled:
        """Writes a one-dimensional tensor of the host."""
        with self._lock:
            free = self._free[flat.numel(), flat.dtype]
            if free:
                place = free.pop()
                place.file.overwrite(place.slot, flat)
            else:
                place = self._new_place(flat)
            self._used += 1
        return Spilled(self, place)

    def give_back(self, place: _Place) -> None:
        """Takes a range back."""
        with self._lock:
            self._free[place.slot.shape[0], place.slot.dtype].append(place)
            self._used -= 1

    def _new_place(self, flat: Tensor) -> _Place:
        if self._used == 0 and self._count:  # other sizes than in the steps before
            self._free.clear()
            self._files = self._files[:1]
            self._files[0].begin_anew()
        self._count += 1
        name = f"activation.{self._count}"
        slot = self._files[-1].add(name, flat)
        if slot is None:
            self._files.append(TensorFile(self._folder, self._technique))
            slot = self._files[-1].add(name, flat)
            assert slot is not None, "a new file has room for a name"
        return _Place(self._files[-1], slot)


@dataclass(frozen=True)
class _Place:
    """A range of a file."""

    file: TensorFile
    slot: Slot


class Spilled:
    """What was written, until this and all tensors that were read are gone."""

    def __init__(self, spill: SpillFile, place: _Place) -> None:
        self._spill, self._place = spill, place

    def read(self) -> Tensor:
        """The tensor, whose memory is the file; what is written to it does not get there."""
        (tensor,) = self._place.file.mapped([self._place.slot], shared=False, holding=self)
        return tensor

    def read_ahead(self) -> None:
        """Lets the system fetch it in the background, where it can."""
        self._place.file.read_ahead(self._place.slot)

    def __del__(self) -> None:
        self._spill.give_back(self._place)
