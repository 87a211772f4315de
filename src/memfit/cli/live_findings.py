"""What `memfit diagnose`'s rules say of a machine or a run, from what the monitor sees of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.monitor.samples import AllocatorSample, Sample, device_of

if TYPE_CHECKING:
    from memfit.analysis.evidence import Evidence
    from memfit.monitor.opening import Opened

MOST_SAMPLES = 200

_STATISTICS = {
    "allocated_bytes.all.current": "allocated_bytes",
    "allocated_bytes.all.peak": "allocated_peak_bytes",
    "active_bytes.all.current": "active_bytes",
    "reserved_bytes.all.current": "reserved_bytes",
    "reserved_bytes.all.peak": "reserved_peak_bytes",
    "requested_bytes.all.current": "requested_bytes",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
    "num_device_alloc": "device_allocs",
    "num_device_free": "device_frees",
}
"""Keys of ``torch.cuda.memory_stats()``, and the figures of a sample that they are."""


class LiveFindings:
    """Asked again and again; remembers the counters of each process in between."""

    def __init__(self) -> None:
        self._statistics: dict[str, deque[dict[str, int]]] = defaultdict(lambda: deque(maxlen=MOST_SAMPLES))

    def __call__(self, sample: Sample) -> Sequence[Mapping[str, Any]]:
        """The findings of now, as JSON."""
        from memfit.analysis.diagnosis import diagnose

        for one in sample.allocators:
            self._statistics[one.key].append(statistics_of(one))
        return [finding.to_json() for finding in diagnose(case=self._case(sample)).findings]

    def _case(self, sample: Sample) -> Evidence:
        from memfit.analysis.evidence import Evidence, GpuProcess, GpuUsage, RankPeak

        alive = [one for one in sample.allocators if one.alive]
        fullest = max(alive, key=lambda one: one.reserved_bytes or 0, default=None)
        on = None if fullest is None else device_of(fullest, sample.devices)
        gpus = [
            GpuUsage(gpu=str(device.index), used_bytes=device.used_bytes, total_bytes=device.total_bytes)
            for device in sample.devices
            if device is on
            and device.name
            and device.used_bytes is not None
            and device.total_bytes is not None
        ]
        labels = {device.key: str(device.index) for device in sample.devices}
        processes = [
            GpuProcess(gpu=labels[one.device], pid=one.pid, name=one.name or "", used_bytes=one.used_bytes)
            for one in sample.processes
            if one.used_bytes is not None and one.device in labels
        ]
        peaks = [
            (one, one.step_peak_bytes or one.allocated_peak_bytes) for one in alive if one.world_size > 1
        ]
        return Evidence(
            statistics=() if fullest is None else tuple(self._statistics[fullest.key]),
            processes=processes,
            gpus=gpus,
            own_pids=frozenset(one.pid for one in alive),
            ranks=[RankPeak(name=one.label, peak_bytes=peak) for one, peak in peaks if peak is not None],
        )


def statistics_of(one: AllocatorSample) -> dict[str, int]:
    """A sample as ``torch.cuda.memory_stats()`` has it, as far as it is known."""
    found = {key: getattr(one, figure) for key, figure in _STATISTICS.items()}
    return {key: int(value) for key, value in found.items() if value is not None}


class RecordingFindings:
    """The findings of a recording: the same whenever they are asked for."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __call__(self, sample: Sample) -> Sequence[Mapping[str, Any]]:
        """The findings, as JSON."""
        from memfit.analysis.diagnosis import diagnose

        return [finding.to_json() for finding in diagnose(self._source).findings]


def findings_of(opened: Opened, source: Path | None) -> LiveFindings | RecordingFindings:
    """What is asked for the findings of what was opened."""
    return LiveFindings() if opened.recording is None or source is None else RecordingFindings(source)
