"""The machine that the GPUs are in: main memory, ``/dev/shm``, pinned memory, the processes' own memory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memfit.monitor.samples import HostSample, Sample

SHARED_MEMORY_FOLDER = "/dev/shm"


class HostSource:
    """Reads the host's memory.

    Args:
        pids: gives the processes whose resident memory is added up; this process where not given.
    """

    name = "host"

    def __init__(self, pids: Callable[[], Sequence[int]] | None = None) -> None:
        self._pids = pids or (lambda: (os.getpid(),))

    def read(self, now_seconds: float) -> Sample:
        """Main memory, shared memory and the processes' share of it."""
        import psutil

        unknown: dict[str, str] = {}
        memory = psutil.virtual_memory()
        total, used = _shared_memory(unknown)
        host = HostSample(
            total_bytes=memory.total,
            available_bytes=memory.available,
            rss_bytes=sum(map(_resident_bytes, self._pids())),
            shm_total_bytes=total,
            shm_used_bytes=used,
            pinned_bytes=_pinned_bytes(unknown),
            unknown=unknown,
        )
        return Sample(time_seconds=now_seconds, host=host)

    def close(self) -> None:
        """Nothing is held open."""


def _shared_memory(unknown: dict[str, str]) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY_FOLDER)
    except OSError as error:
        unknown |= dict.fromkeys(
            ("shm_total_bytes", "shm_used_bytes"), f"{SHARED_MEMORY_FOLDER}: {error.strerror}"
        )
        return None, None
    return usage.total, usage.used


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _pinned_bytes(unknown: dict[str, str]) -> int | None:
    """Page-locked memory of this process, where its PyTorch is loaded, uses CUDA and tells."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        unknown["pinned_bytes"] = "this process does not use CUDA"
        return None
    tell = getattr(cuda, "host_memory_stats", None)
    stats = tell() if tell is not None else {}
    for name in ("allocated_bytes.current", "segment_bytes.current"):
        if name in stats:
            return int(stats[name])
    unknown["pinned_bytes"] = "this version of PyTorch does not tell"
    return None
