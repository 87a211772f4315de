"""The process group that this rank is in: numbers, device, and small values from all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.errors import UsageError

Group = Any
"""A ``torch.distributed`` process group; None is the default one."""


def in_group() -> bool:
    """Whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def under_torchrun() -> bool:
    """Whether a launcher started this process as one of several ranks (or as the only one)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def rank() -> int:
    """This process's rank; 0 where there is no group."""
    return int(dist.get_rank()) if in_group() else 0


def world_size() -> int:
    """How many ranks there are; 1 where there is no group."""
    return int(dist.get_world_size()) if in_group() else 1


def join(backend: str | None = None) -> None:
    """Make the process group that the launcher's environment describes, if there is none yet.

    CUDA ranks get nccl, and gloo beside it for what lies on the host.
    """
    if in_group() or not under_torchrun():
        return
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kind = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(kind)


def own_device() -> torch.device:
    """The GPU of this rank, where the machine has one for each; else the CPU."""
    local = int(os.environ.get("LOCAL_RANK") or rank())
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here > 0:
        return torch.device("cuda", local % torch.cuda.device_count())
    return torch.device("cpu")


def exchanged(value: Any, group: Group = None) -> list[Any]:
    """The value of every rank, by rank; every rank must call this."""
    if not in_group():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def barrier() -> None:
    """Waits for all ranks; nothing without a group."""
    if in_group():
        dist.barrier()


def check_same(value: Any, what: str) -> None:
    """Raises UsageError on all ranks where they do not agree on a value."""
    values: Sequence[Any] = exchanged(value)
    if any(other != values[0] for other in values):
        told = ", ".join(f"rank {number}: {other!r}" for number, other in enumerate(values))
        raise UsageError(f"all ranks must give the same {what}, but {told}")
