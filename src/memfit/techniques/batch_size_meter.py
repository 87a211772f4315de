"""Peaks of memory while something runs: reserved bytes on CUDA, bytes of live tensors elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def limit_of(device: torch.device) -> int:
    """Bytes that may be used: on CUDA what is free with what this process has, else the host's free
    memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    import psutil

    return int(psutil.virtual_memory().available)


class PeakMeter:
    """The peak of what is there while its body runs, what was there before included.

    Args:
        device: whose memory.
        holders: models and optimizers whose tensors are there already (counted where the allocator is not
            asked).
        stop_at_bytes: where the allocator is not asked: a larger peak ends the body as out of memory, so
            that the host is not brought down by a size that cannot fit.
    """

    def __init__(self, device: torch.device, holders: Iterable[Any], stop_at_bytes: int) -> None:
        self._device, self.peak_bytes = device, 0
        self._mode = None if device.type == "cuda" else _LiveTensors(_tensors(holders), stop_at_bytes)

    def __enter__(self) -> Self:
        if self._mode is None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._mode is None:
            self.peak_bytes = torch.cuda.max_memory_reserved(self._device)
        else:
            self._mode.__exit__(*exc)
            self.peak_bytes = self._mode.peak_bytes


class _LiveTensors(TorchDispatchMode):
    """Counts the storages that operators make, from the first to the last tensor on them."""

    def __init__(self, known: Iterable[Tensor], stop_at_bytes: int) -> None:
        super().__init__()
        self._stop_at_bytes = stop_at_bytes
        self._known: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0
        for tensor in known:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper has no memory of its own: what is inside has
            for name in tensor.__tensor_flatten__()[0]:
                self._see(getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key).atexit = False
        if self.live_bytes > self._stop_at_bytes:
            raise torch.OutOfMemoryError(f"{self.live_bytes} bytes are more than twice what is allowed")

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)


def _tensors(holders: Iterable[Any]) -> Iterable[Tensor]:
    for holder in holders:
        if isinstance(holder, nn.Module):
            yield from holder.parameters()
            yield from holder.buffers()
        elif isinstance(holder, Optimizer):
            for state in holder.state.values():
                yield from (value for value in tree_leaves(state) if isinstance(value, Tensor))
