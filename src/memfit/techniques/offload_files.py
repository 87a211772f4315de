"""Files of tensors in safetensors form that no crash can leave behind, written in place and read by mapping.

At every moment between two calls the file is a whole safetensors file: a header that names each tensor and
says where it lies, and the tensors with nothing between them. The header has room from the start, so that a
tensor more is its bytes at the end of the file and a line more in the header; a tensor of the same name, type
and size is written over without touching the header. Source of the form:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.units import format_bytes
from memfit.techniques.codecs.base import raw_bytes

HEADER_BYTES = (1 << 20) - 8
"""Room for some ten thousand tensors; the first of them begins at 1 MiB."""
_ALIGNMENT = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types as safetensors calls them; tensors of others are there as their bytes (U8)."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor lies: bytes from the file's beginning, and what they are."""

    start: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """One such file. On POSIX it has no name, so it is gone when its process is, however that ends.

    Args:
        folder: where; the system's folder for temporary files by default (which may be in memory: see
            ``df``).
        technique: who asks, for the errors.

    Raises:
        UsageError: the folder cannot be written to.
        CannotRunHere: the disk is full.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, technique: str) -> None:
        self._technique = technique
        self.folder = str(folder) if folder is not None else tempfile.gettempdir()
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="memfit-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"{technique}: cannot make a file in {self.folder}: {error.strerror}; choose another folder"
            ) from error
        weakref.finalize(self, self._file.close)
        self._lock = threading.RLock()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets all tensors; none may be mapped."""
        text = b'{"__metadata__":{"format":"pt"}}'
        self._header_end, self._count = len(text), 0
        self._names: set[str] = set()
        self.end = 8 + HEADER_BYTES
        self._file.truncate(0)
        self._put(HEADER_BYTES.to_bytes(8, "little") + text.ljust(HEADER_BYTES), 0)

    @property
    def descriptor(self) -> int:
        """The open file, by number."""
        return self._file.fileno()

    def add(self, name: str, tensor: Tensor) -> Slot | None:
        """Writes a tensor of the host at the end (a name that is there gets a number); ``None``: the header
        has no room for its name.

        Raises:
            CannotRunHere: the disk is full. The file stays as it was.
        """
        with self._lock:
            name = f"{name}#{self._count}" if name in self._names else name
            slot = Slot(
                start=self.end, size_bytes=tensor.nbytes, dtype=tensor.dtype, shape=tuple(tensor.shape)
            )
            padding = -tensor.nbytes % _ALIGNMENT
            text = self._entry(name, slot)
            if padding:
                text += self._entry(
                    f"__padding__.{self._count}",
                    Slot(
                        start=slot.start + slot.size_bytes,
                        size_bytes=padding,
                        dtype=torch.uint8,
                        shape=(padding,),
                    ),
                )
            if self._header_end + len(text) > HEADER_BYTES:
                return None
            try:
                self._put(_memory(tensor), slot.start)
                self._put(bytes(padding), slot.start + slot.size_bytes)
            except CannotRunHere:
                self._file.truncate(self.end)
                raise
            self._put(text + b"}", 8 + self._header_end - 1)
            self._header_end += len(text)
            self._names.add(name)
            self._count += 1
            self.end += slot.size_bytes + padding
            return slot

    def overwrite(self, slot: Slot, tensor: Tensor) -> None:
        """Writes other values of the same type and shape to where a tensor lies."""
        self._put(_memory(tensor), slot.start)

    def mapped(self, slots: Sequence[Slot], *, shared: bool, holding: Any = None) -> list[Tensor]:
        """Tensors whose memory is the file.

        Args:
            slots: what to map, as it was added one after another. All of them cost one open file until the
                last of the tensors is gone.
            shared: whether writing to a tensor writes to the file; if not, to a copy of the page alone.
            holding: lives as long as any of the tensors.
        """
        first, size = slots[0].start, slots[-1].start + slots[-1].size_bytes - slots[0].start
        if size == 0:
            return [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
        before = first % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(
            self.descriptor,
            size + before,
            offset=first - before,
            access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY,
        )
        weakref.finalize(memory, _let_go, holding).atexit = False
        return [_tensor_of(memory, before + slot.start - first, slot) for slot in slots]

    def read_ahead(self, slot: Slot) -> None:
        """Lets the system fetch a tensor in the background, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, slot.start, slot.size_bytes, os.POSIX_FADV_WILLNEED)

    def _entry(self, name: str, slot: Slot) -> bytes:
        known = slot.dtype in _NAMES
        start = slot.start - 8 - HEADER_BYTES
        entry = {
            "dtype": _NAMES.get(slot.dtype, "U8"),
            "shape": list(slot.shape) if known else [slot.size_bytes],
            "data_offsets": [start, start + slot.size_bytes],
        }
        return f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}".encode()

    def _put(self, data: Any, place: int) -> None:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += self._put_some(view[done:], place + done)
        except OSError as error:
            raise self._full(len(view), error) from error

    def _put_some(self, view: memoryview, place: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.descriptor, view, place)
        with self._lock:
            self._file.seek(place)
            return int(self._file.write(view))

    def _full(self, size_bytes: int, error: OSError) -> CannotRunHere:
        free = shutil.disk_usage(self.folder).free
        return CannotRunHere(
            f"{self._technique}: {size_bytes:,} bytes more do not go into {self.folder} ({error.strerror}): "
            f"{self.end:,} bytes are in the file there and {format_bytes(free)} are free; make room, or "
            "choose a folder on another disk (folder=…)"
        )


class MappedFiles:
    """Tensors that live in files from now on: what is written to them is written to the file.

    Args:
        folder: of the files; the system's folder for temporary files by default.
        technique: who asks, for the errors.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, technique: str) -> None:
        self._folder, self._technique = folder, technique
        self.files = [TensorFile(folder, technique)]

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Tensors of the same values whose memory is a file. One open file for all of them, as long as any
        lives.

        Raises:
            CannotRunHere: the disk is full.
        """
        found: list[Tensor] = []
        slots: list[Slot] = []
        for name, tensor in tensors:
            slot = self.files[-1].add(name, tensor)
            if slot is None:
                found += self._mapped(slots)
                self.files.append(TensorFile(self._folder, self._technique))
                slot, slots = self.files[-1].add(name, tensor), []
                assert slot is not None, "a new file has room for a name"
            slots.append(slot)
        return found + self._mapped(slots)

    def _mapped(self, slots: list[Slot]) -> list[Tensor]:
        return self.files[-1].mapped(slots, shared=True) if slots else []


def _tensor_of(memory: mmap.mmap, start: int, slot: Slot) -> Tensor:
    """A tensor in mapped memory, with a storage of its own: nothing before it, nothing after it."""
    count = slot.size_bytes // slot.dtype.itemsize
    if not count:
        return torch.empty(slot.shape, dtype=slot.dtype)
    return torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=start).view(slot.shape)


def _memory(tensor: Tensor) -> Any:
    return raw_bytes(tensor.detach().contiguous().view(-1)).numpy().data


def _let_go(held: Any) -> None:
    """Of what a mapping held: the reference ends with the call."""
