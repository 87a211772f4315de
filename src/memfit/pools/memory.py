"""Pieces of a device's real memory, and tensors that look into them and keep what they look at.

A tensor made here holds its `Pin` through its storage: every view of it, and every graph that saved it, holds
it too. So the pool knows exactly when nobody can reach a block any more, and none is ever used again before.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.units import format_bytes

ALIGNMENTS_BYTES = {"cpu": 64, "cuda": 512}
"""What torch's own allocators align to (c10/core/alignment.h, c10/cuda/CUDACachingAllocator.cpp)."""

_PAGE_BYTES = 4096
_NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
}


class NoSystemMemory(Exception):
    """The device has no such piece of memory; whoever asked says what that means for the user."""


class RealMemory:
    """One contiguous piece of memory of a device, taken from torch until the last tensor in it is gone.

    On CUDA each piece is a private pool of torch's allocator (`torch.cuda.MemPool`): the device has it back
    as soon as it is dropped, and torch's own cache is not touched.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, touch: bool = False) -> None:
        """Take ``size_bytes``; ``touch`` has the system back them with pages now and not at first use.

        Raises:
            NoSystemMemory: the device has no such piece.
        """
        self.device = device
        self.size_bytes = size_bytes
        try:
            self._base, self._private_pool = _take(size_bytes, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise NoSystemMemory(f"{device} gave no {format_bytes(size_bytes)}") from error
        self.address = self._base.data_ptr()
        self._array: Any = self._base.numpy() if device.type == "cpu" else None
        if touch:
            self.touch()

    def touch(self) -> None:
        """Have the system back every page now, and not when it is first used."""
        self._base[::_PAGE_BYTES].add_(0)

    def raw(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """The bytes, for copies and fills of the pool itself: a tensor that keeps nobody's block."""
        return self._base[offset_bytes : offset_bytes + size_bytes]

    def view(self, offset_bytes: int, size_bytes: int, pin: object) -> torch.Tensor:
        """The bytes as a tensor of one dimension whose storage holds ``pin``."""
        if self._array is None:
            piece = _CudaPiece(self.address + offset_bytes, size_bytes, pin)
            return torch.as_tensor(piece, device=self.device)
        return torch.from_numpy(self._piece(offset_bytes, size_bytes, pin))

    def tensor(
        self, offset_bytes: int, dtype: torch.dtype, sizes: tuple[int, ...], pin: object
    ) -> torch.Tensor:
        """A tensor whose storage holds ``pin``. It is no view: a view's base would keep the storage for it
        even after its data was set to another."""
        kind = _NUMPY_DTYPES.get(dtype)
        if self._array is not None and kind is not None:
            piece = np.ndarray.__new__(_CpuPiece, sizes, kind, self._array, offset_bytes)
            piece.pin = pin
            return torch.from_numpy(piece)
        whole = self.view(offset_bytes, math.prod(sizes) * dtype.itemsize, pin)
        bare: Any = torch.empty(0, dtype=dtype, device=self.device)
        tensor: torch.Tensor = bare.set_(whole.untyped_storage(), 0, sizes)
        return tensor

    def buffer(self, offset_bytes: int, size_bytes: int, pin: object) -> memoryview:
        """The bytes for Python's buffer protocol.

        Raises:
            UsageError: memory of a GPU has no address that Python can read.
        """
        if self._array is None:
            raise UsageError(f"memory of {self.device} has no buffer on the host: take tensor() instead")
        piece: Any = self._piece(offset_bytes, size_bytes, pin)
        return memoryview(piece)

    def _piece(self, offset_bytes: int, size_bytes: int, pin: object) -> _CpuPiece:
        piece = np.ndarray.__new__(_CpuPiece, (size_bytes,), np.uint8, self._array, offset_bytes)
        piece.pin = pin
        return piece


class _CpuPiece(np.ndarray[Any, Any]):
    """Bytes that hold a pin; torch and memoryview keep the array that they were made of."""

    __slots__ = ("pin",)
    pin: object


class _CudaPiece:
    """The same for CUDA: torch keeps the object whose ``__cuda_array_interface__`` it took."""

    __slots__ = ("__cuda_array_interface__", "pin")

    def __init__(self, address: int, size_bytes: int, pin: object) -> None:
        self.pin = pin
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device to take memory from: the one named, else the current CUDA device, else the CPU.

    Raises:
        UsageError: a kind of device that pools do not know.
        CannotRunHere: CUDA was asked for and there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not a device of torch: cpu, cuda or cuda:N") from error
    if found.type not in ALIGNMENTS_BYTES:
        raise UsageError(f"device {device!s}: pools take memory of cpu and cuda only")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotRunHere(f"device {device!s}: no CUDA device here; device='cpu' works everywhere")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"device {device!s}: there are {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return torch.device("cuda", index)


def elements(shape: int | tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """A shape as a tuple, and the bytes that a tensor of it has.

    Raises:
        UsageError: a negative or fractional size.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    for size in sizes:
        if type(size) is not int or size < 0:
            raise UsageError(f"shape {shape!r} is not a shape: whole numbers from 0")
    return sizes, math.prod(sizes) * dtype.itemsize


def _take(size_bytes: int, device: torch.device) -> tuple[torch.Tensor, object]:
    if device.type == "cpu":
        return torch.empty(size_bytes, dtype=torch.uint8), None
    private_pool = torch.cuda.MemPool()
    with torch.cuda.device(device), torch.cuda.use_mem_pool(private_pool):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device), private_pool
