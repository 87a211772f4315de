"""Out of memory: which errors mean it, and what an error holds until it is forgotten."""

from __future__ import annotations

import gc
import sys
import traceback

import torch

_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")
_CUDA = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of RuntimeErrors that mean out of memory and have no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on a GPU or on the host. Nothing else does: not a wrong
    index that CUDA reports late, not an error of the user's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (*_CPU, *_CUDA))


def release(error: BaseException) -> None:
    """Lets go of the tensors that the error's frames hold, and of what only cycles and the cache hold.

    The error keeps its text and its lines; the variables of its frames are gone. Call it outside of the
    ``except`` block: in there the interpreter holds the error itself.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if last is not None and is_out_of_memory(last):  # a notebook keeps the last error
        traceback.clear_frames(last.__traceback__)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
