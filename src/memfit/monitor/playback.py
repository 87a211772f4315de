"""A trace or a recorded run as if it happened now, in real time or faster.

A trace has no clock: its training steps are played one a second (or all of it in a minute where it has no
steps), times the speed. A recorded run has times, and is played by them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import Action
from memfit.monitor.levels import Levels
from memfit.monitor.runs import (
    HOST_COLUMNS,
    STEP_COLUMNS,
    Record,
    find_run,
    number_of,
    read_records,
    steps_of,
)
from memfit.monitor.samples import AllocatorSample, HostSample, Sample, Site, Step, process_key

WHOLE_TRACE_SECONDS = 60.0
MOST_SITES = 30


def step_starts(recording: Recording) -> npt.NDArray[np.int64]:
    """The first event of each training step of a trace: where a forward follows an optimizer (or a backward,
    in a trace without one). The first step begins where the trace does."""
    trace = recording.trace
    if not len(trace):
        return np.zeros(0, dtype=np.int64)
    phases = {name: place for place, name in enumerate(trace.strings)}
    last_name = "optimizer" if _has(trace.phase, phases.get("optimizer")) else "backward"
    last, first = phases.get(last_name), phases.get("forward")
    marks = np.isin(trace.phase, [code for code in (last, first) if code is not None])
    index = np.flatnonzero(marks)
    codes = trace.phase[index]
    begins = index[1:][(codes[1:] == first) & (codes[:-1] == last)] if first is not None else index[:0]
    return np.concatenate([[0], begins]).astype(np.int64)


def _has(column: npt.NDArray[np.int32], code: int | None) -> bool:
    return code is not None and bool((column == code).any())


class TracePlayback:
    """Plays the events of a trace.

    Args:
        recording: what `memfit.read_trace` gave.
        speed: steps a second; infinity shows the moment of the peak, with all steps.
        job: what it is called.
    """

    name = "trace"

    def __init__(self, recording: Recording, *, speed: float = 1.0, job: str = "trace") -> None:
        self.recording = recording
        self.timeline = Timeline.of(recording.trace)
        self.starts = step_starts(recording)
        self._job = job
        self._began: float | None = None
        self._steps_told = 0
        self.levels = Levels.of(recording, self.timeline)
        count, steps = len(recording.trace), len(self.starts)
        seconds = float(steps) if steps > 1 else WHOLE_TRACE_SECONDS
        self._events_per_second = math.inf if math.isinf(speed) else speed * max(count, 1) / seconds

    def event_at(self, now_seconds: float) -> int:
        """The newest event that has been played."""
        if self._began is None:
            self._began = now_seconds
        last = len(self.recording.trace) - 1
        if math.isinf(self._events_per_second):
            return self.timeline.peak_index
        return min(last, int((now_seconds - self._began) * self._events_per_second))

    def read(self, now_seconds: float) -> Sample:
        """What the allocator held after the newest event."""
        event = self.event_at(now_seconds)
        if event < 0:
            return Sample(time_seconds=now_seconds, notes=("the trace has no events",), ended=True)
        whole, count = math.isinf(self._events_per_second), len(self.recording.trace)
        notes = (f"a trace: the moment of its peak, after event {event} of {count}",) if whole else ()
        return Sample(
            time_seconds=now_seconds,
            allocators=(self.allocator(event),),
            steps=self._new_steps(count - 1 if whole else event, now_seconds),
            notes=(*notes, *self.recording.notes),
            ended=whole or event >= count - 1,
        )

    def close(self) -> None:
        """Nothing is held open."""

    def allocator(self, event: int) -> AllocatorSample:
        """What the allocator held after ``event``."""
        trace, timeline, levels = self.recording.trace, self.timeline, self.levels
        live = timeline.live_at(event)
        so_far = slice(0, event + 1)
        action = trace.action[so_far]
        allocated, reserved = int(levels.allocated_bytes[event]), int(levels.reserved_bytes[event])
        return AllocatorSample(
            job=self._job,
            requested_bytes=int(levels.live_bytes[event]),
            allocated_bytes=allocated,
            active_bytes=allocated,
            reserved_bytes=reserved,
            allocated_peak_bytes=int(levels.allocated_bytes[so_far].max()),
            reserved_peak_bytes=int(levels.reserved_bytes[so_far].max()),
            run_peak_bytes=int(levels.allocated_bytes[so_far].max()),
            live_blocks=len(live.allocs),
            segments=int((action == Action.SEGMENT_ALLOC).sum() - (action == Action.SEGMENT_FREE).sum()),
            ooms=int((action == Action.OOM).sum()),
            device_allocs=int((action == Action.SEGMENT_ALLOC).sum()),
            device_frees=int((action == Action.SEGMENT_FREE).sum()),
            allocated_total_bytes=int(trace.size_bytes[so_far][action == Action.ALLOC].sum()),
            steps=max(0, bisect.bisect_right(self.starts.tolist(), event) - 1),
            by_category=live.by_category,
            sites=top_sites(self.timeline, event),
            total_bytes=self.recording.total_bytes,
            unknown={
                "alloc_retries": "a trace does not tell",
                "largest_free_bytes": "memfit replay tells it of a trace",
            },
        )

    def steps(self) -> list[Step]:
        """Every training step of the trace; the time is its last event."""
        return [self._step(number) for number in range(len(self.starts))]

    def _step(self, number: int) -> Step:
        begin = int(self.starts[number])
        end = int(self.starts[number + 1]) if number + 1 < len(self.starts) else len(self.recording.trace)
        live = self.levels.allocated_bytes[begin:end]
        return Step(
            key=process_key(self._job, "", 0, 0),
            number=number + 1,
            time_seconds=float(end - 1),
            peak_bytes=int(live.max()),
            end_bytes=int(live[-1]),
        )

    def _new_steps(self, event: int, now_seconds: float) -> tuple[Step, ...]:
        done = bisect.bisect_right(self.starts.tolist(), event) - 1
        done += event >= len(self.recording.trace) - 1 and len(self.starts) > 1
        new = range(self._steps_told, done)
        self._steps_told = max(self._steps_told, done)
        rate = self._events_per_second
        told = (self._step(number) for number in new)
        began = self._began or now_seconds
        return tuple(
            Step(
                key=step.key,
                number=step.number,
                time_seconds=began + (0.0 if math.isinf(rate) else step.time_seconds / rate),
                peak_bytes=step.peak_bytes,
                end_bytes=step.end_bytes,
            )
            for step in told
        )


def top_sites(timeline: Timeline, event: int | None = None) -> tuple[Site, ...]:
    """The places of the program whose blocks hold most after ``event`` (the peak unless given)."""
    live = timeline.live_at(event)
    trace = timeline.trace
    keys = np.stack([getattr(trace, name)[live.allocs] for name in ("where", "module", "category")], axis=1)
    rows, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    held = np.zeros(len(rows), dtype=np.int64)
    np.add.at(held, inverse.reshape(-1), trace.size_bytes[live.allocs])
    order = np.argsort(-held, kind="stable")[:MOST_SITES]
    text = trace.strings
    return tuple(
        Site(
            where=text[rows[place][0]],
            module=text[rows[place][1]],
            category=text[rows[place][2]],
            held_bytes=int(held[place]),
            block_count=int(counts[place]),
        )
        for place in order
    )


class RunPlayback:
    """Plays the records of a run that is over, by their own times.

    Args:
        folder: of the run.
        speed: how many times as fast; infinity shows the end at once.
    """

    name = "recorded run"

    def __init__(self, folder: Path, *, speed: float = 1.0) -> None:
        self.folder = find_run(folder)
        self._speed = speed
        self._began: float | None = None
        self._tracks = [_Track(record) for record in read_records(self.folder)]
        times = [track.times[[0, -1]] for track in self._tracks if len(track.times)]
        self._first, self._last = (
            (float(min(pair[0] for pair in times)), float(max(pair[1] for pair in times)))
            if times
            else (0.0, 0.0)
        )

    def read(self, now_seconds: float) -> Sample:
        """What the records said at the moment that has been reached."""
        if self._began is None:
            self._began = now_seconds
        whole = math.isinf(self._speed)
        at = self._last if whole else min(self._last, self._first + (now_seconds - self._began) * self._speed)
        parts = [track.read(at) for track in self._tracks]
        hosts = [host for host, _, _ in parts if host is not None]
        return Sample(
            time_seconds=at,
            host=hosts[0] if hosts else None,
            allocators=tuple(one for _, allocators, _ in parts for one in allocators),
            steps=tuple(step for _, _, steps in parts for step in steps),
            ended=at >= self._last,
        )

    def close(self) -> None:
        """Nothing is held open."""


class _Track:
    """One process of a run that is played."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._devices = {
            name: record.history(name).samples() for name in record.devices if record.history(name)
        }
        self._host = record.history("host").samples() if record.history("host") else None
        steps = record.history("steps").samples() if record.history("steps") else None
        self._steps: Sequence[Step] = (
            ()
            if steps is None
            else steps_of(
                record.key, steps.time_seconds.tolist(), {n: steps.values[n].tolist() for n in STEP_COLUMNS}
            )
        )
        self._told = 0
        rows = [*self._devices.values(), *([self._host] if self._host else [])]
        self.times = np.sort(np.concatenate([part.time_seconds for part in rows])) if rows else np.zeros(0)

    def read(self, at: float) -> tuple[HostSample | None, list[AllocatorSample], list[Step]]:
        """Host, allocators, and the steps since the last call."""
        allocators = []
        for name, rows in self._devices.items():
            place = int(np.searchsorted(rows.time_seconds, at, side="right")) - 1
            if place >= 0:
                values = {column: float(series[place]) for column, series in rows.values.items()}
                allocators.append(self._record.allocator(name, values))
        host = None
        if self._host is not None:
            place = int(np.searchsorted(self._host.time_seconds, at, side="right")) - 1
            if place >= 0:
                host = HostSample(
                    **{name: number_of(name, float(self._host.values[name][place])) for name in HOST_COLUMNS}  # type: ignore[arg-type]
                )
        steps = [step for step in self._steps[self._told :] if step.time_seconds <= at]
        self._told += len(steps)
        return host, allocators, steps
