"""What the page shows: a live machine or run, or a trace; one interface for both."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.errors import InputError, MemfitError
from memfit.dashboard.look import PAINTS
from memfit.dashboard.trace_series import TraceSeries, plain
from memfit.monitor.alert_record import change_json
from memfit.monitor.engine import DEVICE_COLUMNS, Monitor, Status
from memfit.monitor.history import History, Series
from memfit.monitor.identity import plain_name
from memfit.monitor.opening import Opened
from memfit.monitor.playback import TracePlayback, top_sites
from memfit.monitor.ring import Floats
from memfit.monitor.runs import Record, read_records
from memfit.monitor.samples import Sample, to_json
from memfit.reports.palette import CATEGORY_PAINTS

LOGGER = logging.getLogger("memfit.dashboard")
MOST_POINTS = 4000
MOST_MARKS = 300

Findings = Callable[[Sample], Sequence[Mapping[str, Any]]]
"""Gives the findings of what is shown now, each as `memfit.analysis.findings.Finding.to_json` has it."""


class Feed(ABC):
    """What is shown.

    Attributes:
        version: rises with every change of `state`.

    Args:
        opened: what was opened.
        monitor: polls it.
        findings: asked in a thread of its own: once of a trace, again and again of what is live.
    """

    def __init__(self, opened: Opened, monitor: Monitor, *, findings: Findings | None = None) -> None:
        self.opened = opened
        self.monitor = monitor
        self.version = 0
        self._lock = threading.Lock()
        self._ask = findings
        self._findings: list[Mapping[str, Any]] = []
        self._findings_note = "Looking for findings…" if findings else "Nobody looks for findings here."
        self._sample: Sample | None = None
        self._state: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        """All that changes, as JSON; new after each `poll`."""
        return self._state

    def poll(self) -> bool:
        """Read the sources once; False when nothing new will come."""
        status = self.monitor.poll()
        self._sample = status.sample
        with self._lock:
            self._state = {**self._describe(status), "version": self.version + 1}
            self.version += 1
        return not status.sample.ended

    def find(self) -> None:
        """Ask for the findings. Whatever goes wrong is said on the page."""
        if self._ask is None or self._sample is None:
            return
        try:
            self._findings = list(self._ask(self._sample))
            self._findings_note = "" if self._findings else "The rules of memfit diagnose find nothing wrong."
        except MemfitError as error:
            self._findings_note = f"No findings: {error}"
        except Exception as error:  # a rule may fail on a recording; the page goes on, and says so
            LOGGER.exception("looking for findings failed")
            self._findings_note = f"No findings: {type(error).__name__}: {error}"
        with self._lock:
            self._state = {**self._state, **self._finding_part(), "version": self.version + 1}
            self.version += 1

    def close(self) -> None:
        """Close the monitor."""
        self.monitor.close()

    @abstractmethod
    def timeline(self, subject: str, begin: float, end: float, points: int) -> dict[str, Any]:
        """Memory of a device or allocator over a stretch of time (or of events)."""

    @abstractmethod
    def steps(self, subject: str, points: int) -> dict[str, Any]:
        """The peak of every training step of a process."""

    @abstractmethod
    def moment(self, subject: str, at: float) -> dict[str, Any]:
        """Who held memory at one moment."""

    def _finding_part(self) -> dict[str, Any]:
        return {"findings": [dict(one) for one in self._findings], "findings_note": self._findings_note}

    def _describe(self, status: Status) -> dict[str, Any]:
        return {
            **status.to_json(),
            **self._finding_part(),
            "title": self.opened.title,
            "kind": self.opened.kind,
            "live": self.opened.live,
            "ended": status.sample.ended,
            "changes": [
                *(change_json(at, change) for at, change in reversed(status.changes)),
                *reversed(status.earlier_changes),
            ],
            "recent": {key: plain(np.array(values)) for key, values in status.recent.items()},
        }


class TraceFeed(Feed):
    """A trace, or any recording that memfit reads: events instead of time."""

    def __init__(self, opened: Opened, monitor: Monitor, *, findings: Findings | None = None) -> None:
        super().__init__(opened, monitor, findings=findings)
        assert opened.recording is not None
        self._playback = next(source for source in opened.sources if isinstance(source, TracePlayback))
        self._recording = opened.recording
        self._series = TraceSeries(opened.recording, self._playback.timeline)
        self._steps = self._playback.steps()

    @property
    def _played(self) -> int:
        """How many events are shown: all, or those that have been played."""
        if self.opened.whole:
            return self._series.count
        return min(self._series.count, self._playback.event_at(time.time()) + 1)

    def timeline(self, subject: str, begin: float, end: float, points: int) -> dict[str, Any]:
        """Live bytes by category, and the reserved line, over the events."""
        last = self._played
        first, stop = _clamp(begin, 0, last), _clamp(end, 0, last)
        events = self._series.chosen(int(first), math.ceil(stop), min(points, MOST_POINTS))
        live = self._series.at(events)
        bands = [_band(name, live[name]) for name in CATEGORY_PAINTS if name in live]
        lines, unused = [], []
        if self._series.has_reserved:
            reserved = self._series.levels.reserved_bytes[events]
            lines.append({"key": "reserved", "label": "Reserved", "values": plain(reserved)})
            allocated = self._series.levels.allocated_bytes[events]
            unused = plain(1 - allocated / np.maximum(reserved, 1))
        return {
            "axis": "event",
            "first": 0,
            "last": max(0, last - 1),
            "x": plain(events),
            "bands": bands,
            "lines": lines,
            "ratio": unused,
            "limit_bytes": self._recording.total_bytes,
            "marks": list(self._marks(int(first), int(stop))),
        }

    def _marks(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        peak = self._playback.timeline.peak_index
        if begin <= peak < end:
            yield {"x": peak, "kind": "peak", "text": "peak"}
        ooms = self._series.oom_events
        for event in ooms[(ooms >= begin) & (ooms < end)][:MOST_MARKS].tolist():
            yield {"x": event, "kind": "oom", "text": "out of memory"}
        starts = self._playback.starts
        inside = starts[(starts >= begin) & (starts < end)]
        if len(inside) <= MOST_MARKS:
            for event in inside.tolist():
                number = int(np.searchsorted(starts, event)) + 1
                yield {"x": event, "kind": "step", "text": f"step {number}"}

    def steps(self, subject: str, points: int) -> dict[str, Any]:
        """Peak and end of every step that has been played."""
        done = [step for step in self._steps if step.time_seconds < self._played]
        shown = done if len(done) > 1 else []
        columns = {
            "x": [float(step.number) for step in shown],
            "peak": [float(step.peak_bytes or 0) for step in shown],
            "end": [float(step.end_bytes or 0) for step in shown],
        }
        return _thinned_steps(columns, points)

    def moment(self, subject: str, at: float) -> dict[str, Any]:
        """The account and the sites after an event."""
        event = int(_clamp(at, 0, max(0, self._series.count - 1)))
        if not self._series.count:
            return {"at": 0, "sites": []}
        sites = [to_json(site) for site in top_sites(self._playback.timeline, event)]
        return {"at": event, "live_bytes": int(self._series.levels.live_bytes[event]), "sites": sites}


_LIVE_BANDS = ("allocated", "stranded", "cached")


def _band(key: str, values: Any) -> dict[str, Any]:
    return {"key": key, "label": PAINTS[key].label, "values": plain(values)}


class LiveFeed(Feed):
    """A machine or a run, live or recorded: time on the axis, history from disk.

    Args:
        device_history: the folder that the monitor keeps devices in.
    """

    def __init__(
        self,
        opened: Opened,
        monitor: Monitor,
        *,
        findings: Findings | None = None,
        device_history: Path | None = None,
    ) -> None:
        super().__init__(opened, monitor, findings=findings)
        self._device_history = device_history

    def timeline(self, subject: str, begin: float, end: float, points: int) -> dict[str, Any]:
        """The allocator's bytes over time, or a device's used bytes."""
        found = self._find_record(subject)
        if found is None:
            return self._device_timeline(subject, begin, end, points)
        record, name = found
        series = self._series(record.history(name), begin, end, points)
        bands = [_band(key, values) for key, values in zip(_LIVE_BANDS, _parts(series), strict=True)]
        lines = [
            {"key": "reserved", "label": "Reserved", "values": plain(series.high["reserved_bytes"])},
            {"key": "peak", "label": "Peak of a step", "values": plain(_peak_line(series))},
        ]
        return {
            **self._axis(record.history(name)),
            "x": plain(series.time_seconds),
            "bands": bands,
            "lines": [line for line in lines if any(value is not None for value in line["values"])],
            "ratio": plain(_fragmentation(series)),
            "limit_bytes": self._limit(subject),
            "marks": list(_count_marks(series)),
        }

    def _device_timeline(self, subject: str, begin: float, end: float, points: int) -> dict[str, Any]:
        folder = self._device_history and self._device_history / f"gpu-{plain_name(subject)}"
        history = History(folder) if folder else None
        if not history:
            nothing: dict[str, Any] = {"axis": "time", "first": 0, "last": 0, "limit_bytes": None}
            return {**nothing, "x": [], "bands": [], "lines": [], "marks": []}
        series = self._series(history, begin, end, points)
        assert set(series.last) == set(DEVICE_COLUMNS)
        return {
            **self._axis(history),
            "x": plain(series.time_seconds),
            "bands": [_band("used", series.high["used_bytes"])],
            "lines": [],
            "limit_bytes": self._limit(subject),
            "marks": [],
        }

    def steps(self, subject: str, points: int) -> dict[str, Any]:
        """Peak and end of every step of the subject's process that is kept."""
        found = self._find_record(subject)
        history = found[0].history("steps") if found else None
        if not history:
            return _thinned_steps({"x": [], "peak": [], "end": []}, points)
        rows = history.samples().values
        columns = {
            "x": rows["number"].tolist(),
            "peak": rows["peak_bytes"].tolist(),
            "end": rows["end_bytes"].tolist(),
        }
        return _thinned_steps(columns, points)

    def moment(self, subject: str, at: float) -> dict[str, Any]:
        """The sites that were last written; records keep no earlier ones."""
        found = self._find_record(subject)
        sites = found[0].sites(found[1]) if found else ()
        return {"at": at, "sites": [to_json(site) for site in sites]}

    def _series(self, history: History, begin: float, end: float, points: int) -> Series:
        return history.series(begin_seconds=begin, end_seconds=end, points=min(points, MOST_POINTS))

    def _axis(self, history: History) -> dict[str, Any]:
        times = history.series(points=2).time_seconds
        newest = history.samples(after=0).time_seconds
        return {
            "axis": "time",
            "first": float(times[0]) if len(times) else 0.0,
            "last": float(newest[-1]) if len(newest) else 0.0,
        }

    def _records(self) -> list[Record]:
        run = self.opened.run
        if run is None or not run.is_dir():
            return []
        return read_records(run) or [
            record for folder in sorted(run.iterdir()) if folder.is_dir() for record in read_records(folder)
        ]

    def _find_record(self, subject: str) -> tuple[Record, str] | None:
        for record in self._records():
            for name, device in record.devices.items():
                if f"{record.key}/gpu{device.get('index')}" == subject:
                    return record, name
        return None

    def _limit(self, subject: str) -> int | None:
        """What the device of a subject has in all."""
        devices = self._state.get("devices", [])
        allocator = next((one for one in self._state.get("allocators", []) if one["key"] == subject), None)
        for device in devices:
            same = allocator is not None and (
                device["uuid"] == allocator["uuid"]
                if allocator["uuid"]
                else device["index"] == allocator["index"]
            )
            if device["key"] == subject or same:
                total = device["total_bytes"]
                return int(total) if total is not None else None
        return None


def make_feed(
    opened: Opened, monitor: Monitor, *, findings: Findings | None = None, device_history: Path | None = None
) -> Feed:
    """The feed for what was opened."""
    if opened.recording is not None:
        return TraceFeed(opened, monitor, findings=findings)
    return LiveFeed(opened, monitor, findings=findings, device_history=device_history)


def _clamp(value: float, low: float, high: float) -> float:
    if math.isnan(value):
        raise InputError("a number is needed")
    return max(low, min(high, value))


def _parts(series: Series) -> list[Floats]:
    """Tensors, stranded and cached bytes at the highest of each stretch; they add up to what is reserved."""
    last = series.last
    allocated = series.high["allocated_bytes"]
    reserved = np.fmax(series.high["reserved_bytes"], allocated)
    cached = np.maximum(reserved - np.fmax(allocated, last["active_bytes"]), 0)
    stranded = np.fmin(np.nan_to_num(last["inactive_split_bytes"]), cached)
    return [allocated, stranded, cached - stranded]


def _peak_line(series: Series) -> Floats:
    peak: Floats = np.fmax(series.high["step_peak_bytes"], series.high["allocated_bytes"])
    return peak


def _fragmentation(series: Series) -> Floats:
    free, largest = series.last["free_cached_bytes"], series.last["largest_free_bytes"]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares: Floats = np.where(free > 0, 1 - largest / free, np.where(free == 0, 0, np.nan))
    return shares


def _count_marks(series: Series) -> Iterator[dict[str, Any]]:
    """Where the counters of retries and out-of-memory errors rose."""
    for column, kind, text in (("ooms", "oom", "out of memory"), ("alloc_retries", "retry", "cache flushed")):
        rises = np.flatnonzero(np.diff(np.nan_to_num(series.high[column])) > 0)[:MOST_MARKS] + 1
        for place in rises.tolist():
            yield {"x": float(series.time_seconds[place]), "kind": kind, "text": text}


def _thinned_steps(columns: Mapping[str, Sequence[float]], points: int) -> dict[str, Any]:
    """Steps in no more than ``points`` bars: each is the highest peak and the last end of its steps."""
    number, peak, end = (np.asarray(columns[name], dtype=np.float64) for name in ("x", "peak", "end"))
    count, most = len(number), max(1, min(points, MOST_POINTS))
    if count > most:
        starts = np.linspace(0, count, most, endpoint=False).astype(np.int64)
        ends = np.append(starts[1:], count) - 1
        number, peak, end = number[ends], np.fmax.reduceat(peak, starts), end[ends]
    return {"count": count, "x": plain(number), "peak": plain(peak), "end": plain(end)}
