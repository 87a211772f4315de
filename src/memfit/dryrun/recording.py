"""PyTorch's own records of one run: the allocator's event history and its peaks, kept whole whatever the
script does.

A script may record and dump its own snapshots and reset peaks; it goes on seeing what it would see, while the
dry run's record has everything, of each device apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import memory

from memfit.dryrun.devices import used_devices
from memfit.dryrun.history import Position

MOST_EVENTS = 4_000_000
_PEAKS = ("requested_bytes", "allocated_bytes", "reserved_bytes")

Moment = tuple[Position, ...]
"""Where the history of each device is, by the device's number; of devices past its end, at its beginning."""


class Recording:
    """The whole run's history and peaks.

    Args:
        is_ours: whether this process is the one that is recorded (a forked child is not).
    """

    def __init__(self, is_ours: Callable[[], bool]) -> None:
        self._is_ours = is_ours
        self._highest: dict[int, dict[str, int]] = {}
        self._counted: dict[int, Position] = {}  # what accumulated counters showed when the script reset them
        self._started = False
        # The script's own recording: from and to (of each device), at most.
        self._window: tuple[list[int], list[int] | None, int] | None = None
        self._snapshot = torch._C._cuda_memorySnapshot

    def install(self) -> None:
        """Begin when the script first touches CUDA, and stand between it and the counters."""
        begin = functools.partial(memory._record_memory_history, "all", "alloc", "python", MOST_EVENTS)

        def start() -> None:
            if self._is_ours():
                begin()
                self._started = True

        torch.cuda._lazy_call(start)
        self._guard("_cuda_resetPeakMemoryStats", self._keep_peaks)
        self._guard("_accelerator_resetPeakStats", self._keep_peaks)
        self._guard("_cuda_resetAccumulatedMemoryStats", self._keep_counts)
        self._guard("_accelerator_resetAccumulatedStats", self._keep_counts)
        memory._record_memory_history = self._script_records
        setattr(torch._C, "_cuda_memorySnapshot", self._script_snapshot)  # noqa: B010

    @property
    def started(self) -> bool:
        """Whether the script has touched CUDA."""
        return self._started

    def position(self, device: int) -> Position:
        """Where the history of a device is now."""
        if not self._started:
            return Position()
        counts = torch._C._cuda_memoryStats(device)["allocation"]["all"]
        before = self._counted.get(device, Position())
        return Position(counts["allocated"] + before.allocs, counts["freed"] + before.frees)

    def moment(self) -> Moment:
        """Where the history of every device is now."""
        used = used_devices()
        return tuple(
            self.position(device) if device in used else Position()
            for device in range(max(used, default=-1) + 1)
        )

    def peaks(self, device: int) -> dict[str, int]:
        """The highest requested, allocated and reserved bytes of the whole run on a device."""
        if self._started:
            self._keep_peaks(device)
        return dict(self._highest.get(device, dict.fromkeys(_PEAKS, 0)))

    def events(self, device: int) -> list[dict[str, Any]]:
        """PyTorch's events of a device."""
        traces = self.snapshot()["device_traces"]
        return list(traces[device]) if device < len(traces) else []

    def snapshot(self) -> dict[str, Any]:
        """PyTorch's snapshot with all events."""
        empty: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
        return self._snapshot(None) if self._started else empty

    def _keep_peaks(self, device: int) -> None:
        stats = torch._C._cuda_memoryStats(device)
        highest = self._highest.setdefault(device, dict.fromkeys(_PEAKS, 0))
        for name in _PEAKS:
            highest[name] = max(highest[name], stats[name]["all"]["peak"])

    def _keep_counts(self, device: int) -> None:
        self._counted[device] = self.position(device)

    def _guard(self, name: str, keep: Callable[[int], None]) -> None:
        original = getattr(torch._C, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def guarded(*args: Any) -> Any:
            if self._started and self._is_ours():
                keep(args[0])
            return original(*args)

        setattr(torch._C, name, guarded)

    def _script_records(self, enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
        """The script's own ``_record_memory_history``: notes from where to where its snapshots reach."""
        torch.cuda.init()
        count = [len(trace) for trace in self.snapshot()["device_traces"]]
        if enabled in (None, False):
            if self._window is not None:
                self._window = (self._window[0], count, self._window[2])
            return
        position = args[2] if len(args) > 2 and isinstance(enabled, str) else None
        most = kwargs.get("max_entries", position) or MOST_EVENTS
        self._window = (count, None, int(most))

    def _script_snapshot(self, *args: Any) -> dict[str, Any]:
        """The snapshot that the script's own recording would have given."""
        snapshot: dict[str, Any] = self._snapshot(*args)
        if not self._is_ours():
            return snapshot
        begin, end, most = self._window or ([], [], 0)
        traces = []
        for device, trace in enumerate(snapshot["device_traces"]):
            window = trace[begin[device] : None if end is None else end[device]] if most else []
            traces.append([event for event in window if event["action"] != "snapshot"][-most:])
        return {**snapshot, "device_traces": traces}
