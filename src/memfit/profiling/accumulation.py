"""Autograd adds gradients that meet in place, but not on meta tensors; this tells when it would have.

The engine takes meta tensors, and any tensor while a dispatch mode is active, for something of unknown
semantics and adds out of place. That costs a temporary that the same step does not have on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_REFERENCES = 4  # to the tensor, when only the engine owns it: the engine's, the call's and two of Python's
_STORAGE_REFERENCES = 2  # to its storage: the tensor's and Python's


def accumulates(func: Any, args: Any) -> bool:
    """Whether this call, seen in a mode's ``__torch_dispatch__``, is the engine adding into its own gradient.

    The mode may then run ``aten.add_`` instead, as the engine would without it.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return False
    if torch.is_grad_enabled() or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return False
    own, other = args
    if own.layout is not torch.strided or own.shape != other.shape or own.dtype is not other.dtype:
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(own):
        return False
    storage = own.untyped_storage()
    references = torch._C._storage_Use_Count(storage._cdata)
    return bool(references == _STORAGE_REFERENCES and own._use_count() == _REFERENCES + _modes_outside())


def _modes_outside() -> int:
    """How many modes have passed the call on to the one that asks; each holds a reference of its own."""
    count = 0
    frame: Any = sys._getframe(3)
    while frame is not None:
        count += frame.f_code.co_name == "__torch_dispatch__"
        frame = frame.f_back
    return count
