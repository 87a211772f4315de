"""Tensors in memory that several processes see: nothing is copied, and nothing is left behind.

The memory has no name (``memfd_create`` on Linux, an unlinked file elsewhere): it is gone when the last
process that has it is gone, however that ended, and it does not count against the size of ``/dev/shm``,
which is 64 MB in a container by default. What a process sends to another is a file descriptor and a table of
places.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.core.errors import CannotRunHere, UsageError

_ALIGNMENT = 64

Place = tuple[int, tuple[int, ...], torch.dtype]
"""Where a tensor starts, its shape and type."""


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors in one piece of shared memory; a mapping from names to them.

    Can be given to other processes in every way that ``multiprocessing`` has: as an argument of a process
    (forked or spawned), through a queue or a pipe. All see the same memory, and what one writes the others
    read; who may write when is the user's to arrange (by a queue of slot numbers, as in the documentation).

    Args:
        tensors: copied into the shared memory once.

    Raises:
        UsageError: not a mapping of names to plain tensors of the CPU.
        CannotRunHere: on Windows.

    Examples:
        >>> import torch
        >>> shared = SharedTensors({"weights": torch.arange(3.0)})
        >>> shared["weights"]
        tensor([0., 1., 2.])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise UsageError(
                f"SharedTensors takes a mapping of names to tensors, not a {type(tensors).__name__}"
            )
        layout: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
                raise UsageError(
                    f"SharedTensors: {name!r} must be a dense tensor, not a {type(tensor).__name__}"
                )
            layout[name] = (tuple(tensor.shape), tensor.dtype)
        places, size_bytes = _places(layout)
        self._set_up(_anonymous_file(size_bytes), size_bytes, places)
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._tensors[name].copy_(tensor)

    @classmethod
    def empty(cls, layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> SharedTensors:
        """Memory of zeros for tensors of the given shapes and types, to be filled by any process."""
        places, size_bytes = _places(layout)
        made = cls.__new__(cls)
        made._set_up(_anonymous_file(size_bytes), size_bytes, places)
        return made

    def _set_up(self, handle: int, size_bytes: int, places: Mapping[str, Place]) -> None:
        self._handle, self.nbytes, self._places = handle, size_bytes, dict(places)
        memory = mmap.mmap(handle, max(size_bytes, 1))
        whole = torch.frombuffer(
            memory, dtype=torch.uint8
        )  # keeps the mapping as long as a tensor of it lives
        self._tensors = {
            name: whole[start : start + _nbytes(shape, dtype)].view(dtype).view(shape)
            for name, (start, shape, dtype) in self._places.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _received, (DupFd(self._handle), self.nbytes, self._places)

    def close(self) -> None:
        """Gives the memory up in this process, once no tensor of it is used any more. Again is no error."""
        self._tensors = {}
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            self.close()


def _received(handle: Any, size_bytes: int, places: Mapping[str, Place]) -> SharedTensors:
    """In the process that gets it: the same memory."""
    made = SharedTensors.__new__(SharedTensors)
    made._set_up(handle.detach(), size_bytes, places)
    return made


def _places(layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> tuple[dict[str, Place], int]:
    places: dict[str, Place] = {}
    end = 0
    for name, (shape, dtype) in layout.items():
        places[name] = (end, tuple(shape), dtype)
        end += -(-_nbytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize


def _anonymous_file(size_bytes: int) -> int:
    """A descriptor of memory without a name."""
    if sys.platform == "win32":
        raise CannotRunHere("SharedTensors needs POSIX; on Windows use tensor.share_memory_()")
    try:
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("memfit-shared", os.MFD_CLOEXEC)
        else:
            handle, path = tempfile.mkstemp(prefix="memfit-shared-")
            os.unlink(path)
        os.ftruncate(handle, max(size_bytes, 1))
    except OSError as error:
        raise UsageError(f"no shared memory of {size_bytes} bytes: {error.strerror}") from error
    return handle
