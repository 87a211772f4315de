"""What alerts are about: figures that follow from samples, each with the device or process that has it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memfit.monitor.estimates import Growth, growth, imbalance, seconds_to_oom
from memfit.monitor.samples import AllocatorSample, DeviceSample, Sample, Step, device_of

QUANTITIES: Mapping[str, str] = {
    "device_used_ratio": "used memory of a device / its total",
    "growth_bytes_per_step": "growth of what is held at the end of each step; 0 where no trend is certain",
    "growth_bytes_per_hour": "growth of what a process holds, by the clock; 0 where no trend is certain",
    "time_to_oom_seconds": "when the room of a process is gone at that growth",
    "alloc_retries_per_minute": "how often PyTorch had to empty its cache to serve a request",
    "ooms_per_minute": "out-of-memory errors, also those that the program caught",
    "fragmentation_ratio": "1 - largest free piece / all free pieces of PyTorch's cache",
    "stranded_ratio": "free pieces of segments in use / (these + what the device has free); needs 2 %",
    "untracked_growth_bytes": "how much used memory outside the watched allocators grew in ten minutes",
    "rank_imbalance_ratio": "(largest - median) / median of the ranks' allocated peaks",
    "shm_used_ratio": "used part of /dev/shm",
    "host_used_ratio": "used part of main memory",
}
"""Every name that an alert rule may use, and what it means."""

WINDOW_SECONDS = 600.0
RATE_SECONDS = 60.0
FIT_SECONDS = 5.0
MOST_POINTS = 2000
_LEAST_STRANDED_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One figure of one thing.

    Args:
        name: of `QUANTITIES`.
        subject: whose figure: a label of a device or an allocator, or ``"host"``.
        value: the figure.
    """

    name: str
    subject: str
    value: float


@dataclass
class _Past:
    """What is remembered of one process on one device."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    held: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    counts: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))


@dataclass
class _Steps:
    numbers: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    held: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The growth of one process, and when it was fitted."""

    at_seconds: float
    per_step: Growth | None
    per_second: Growth | None
    bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How one process grows.

    Args:
        per_step, per_second: the growth; None for too few points.
        room_bytes: what is free on the device and in the process's cache.
        seconds_to_oom: infinity where nothing grows.
    """

    per_step: Growth | None
    per_second: Growth | None
    room_bytes: int | None
    seconds_to_oom: float | None


class Trends:
    """Remembers the last samples, and derives growth and rates from them."""

    def __init__(self) -> None:
        self._past: dict[str, _Past] = defaultdict(_Past)
        self._steps: dict[str, _Steps] = defaultdict(_Steps)
        self._fits: dict[str, _Fit] = {}
        self._untracked: dict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=MOST_POINTS))

    def add(self, sample: Sample) -> None:
        """Take in one merged sample."""
        for step in sample.steps:
            self._add_step(step)
        for one in sample.allocators:
            past = self._past[one.key]
            if past.times and past.times[-1] == sample.time_seconds:
                continue
            past.times.append(sample.time_seconds)
            past.held.append(math.nan if one.allocated_bytes is None else float(one.allocated_bytes))
            past.counts.append((sample.time_seconds, one.alloc_retries or 0, one.ooms or 0))
        for device in sample.devices:
            untracked = untracked_bytes(device, sample)
            if untracked is not None:
                self._untracked[device.key].append((sample.time_seconds, untracked))

    def _add_step(self, step: Step) -> None:
        past = self._steps[step.key]
        if step.end_bytes is not None and not (past.numbers and past.numbers[-1] >= step.number):
            past.numbers.append(float(step.number))
            past.held.append(float(step.end_bytes))
        if step.seconds is not None:
            past.seconds.append(step.seconds)

    def trend(self, one: AllocatorSample, device: DeviceSample | None) -> Trend:
        """Growth of one process on one device; by its steps where they are counted, else by the clock.

        The growth is fitted anew every `FIT_SECONDS`; the room is that of the newest sample.
        """
        fit = self._fit(one)
        room = room_bytes(one, device)
        return Trend(
            per_step=fit.per_step,
            per_second=fit.per_second,
            room_bytes=room,
            seconds_to_oom=seconds_to_oom(room, fit.bytes_per_second),
        )

    def _fit(self, one: AllocatorSample) -> _Fit:
        past = self._past[one.key]
        now = past.times[-1] if past.times else 0.0
        known = self._fits.get(one.key)
        if known is not None and known.at_seconds <= now < known.at_seconds + FIT_SECONDS:
            return known
        steps = self._steps.get(one.process_key)
        per_step = growth(steps.numbers, steps.held) if steps else None
        per_second = growth(past.times, past.held)
        rate = per_second.bytes_per_unit if per_second else None
        if steps and per_step and steps.seconds:
            step_seconds = sorted(steps.seconds)[len(steps.seconds) // 2]
            rate = per_step.bytes_per_unit / step_seconds if step_seconds > 0 else rate
        fit = _Fit(at_seconds=now, per_step=per_step, per_second=per_second, bytes_per_second=rate)
        self._fits[one.key] = fit
        return fit

    def per_minute(self, one: AllocatorSample) -> tuple[float, float]:
        """Retries and out-of-memory errors in the last minute."""
        counts = self._past[one.key].counts
        if not counts:
            return 0.0, 0.0
        now, retries, ooms = counts[-1]
        base = next((row for row in counts if row[0] >= now - RATE_SECONDS), counts[-1])
        return float(max(0, retries - base[1])), float(max(0, ooms - base[2]))

    def untracked_growth(self, device: DeviceSample) -> float | None:
        """How much the memory outside the watched allocators rose above its least in the window."""
        past = self._untracked.get(device.key)
        if not past:
            return None
        now = past[-1][0]
        return float(past[-1][1] - min(held for at, held in past if at >= now - WINDOW_SECONDS))


def untracked_bytes(device: DeviceSample, sample: Sample) -> int | None:
    """Used on a device, but by none of the watched allocators: contexts, libraries, other processes."""
    if device.used_bytes is None:
        return None
    watched = [one for one in sample.allocators if one.alive and device_of(one, sample.devices) is device]
    return max(0, device.used_bytes - sum(one.reserved_bytes or 0 for one in watched)) if watched else None


def room_bytes(one: AllocatorSample, device: DeviceSample | None) -> int | None:
    """What a process can still allocate: free on the device, and cached by itself."""
    if device is None or device.free_bytes is None or one.cached_bytes is None:
        return None
    return device.free_bytes + one.cached_bytes


def quantities(sample: Sample, trends: Trends) -> list[Quantity]:
    """Every figure that alerts can be about and that is known now."""
    found = [
        *(q for device in sample.devices for q in _of_device(device, trends)),
        *(q for one in sample.allocators if one.alive for q in _of_allocator(one, sample, trends)),
        *_of_ranks(sample),
        *_of_host(sample),
    ]
    return [
        Quantity(name=name, subject=subject, value=float(value))
        for name, subject, value in found
        if value is not None
    ]


_Found = Iterator[tuple[str, str, float | None]]


def _of_device(device: DeviceSample, trends: Trends) -> _Found:
    if device.total_bytes and device.used_bytes is not None:
        yield "device_used_ratio", device.label, device.used_bytes / device.total_bytes
    yield "untracked_growth_bytes", device.label, trends.untracked_growth(device)


def _of_allocator(one: AllocatorSample, sample: Sample, trends: Trends) -> _Found:
    device = device_of(one, sample.devices)
    trend = trends.trend(one, device)
    retries, ooms = trends.per_minute(one)
    yield "growth_bytes_per_step", one.label, trend.per_step.bytes_per_unit if trend.per_step else None
    hourly = trend.per_second.bytes_per_unit * 3600 if trend.per_second else None
    yield "growth_bytes_per_hour", one.label, hourly
    yield "time_to_oom_seconds", one.label, trend.seconds_to_oom
    yield "alloc_retries_per_minute", one.label, retries
    yield "ooms_per_minute", one.label, ooms
    yield "fragmentation_ratio", one.label, one.fragmentation_ratio
    yield "stranded_ratio", one.label, _stranded(one, device)


def _stranded(one: AllocatorSample, device: DeviceSample | None) -> float | None:
    if (
        device is None
        or not device.total_bytes
        or device.free_bytes is None
        or one.inactive_split_bytes is None
    ):
        return None
    if one.inactive_split_bytes < _LEAST_STRANDED_SHARE * device.total_bytes:
        return 0.0
    return one.inactive_split_bytes / (one.inactive_split_bytes + device.free_bytes)


def _of_ranks(sample: Sample) -> _Found:
    jobs: dict[str, list[float]] = defaultdict(list)
    for one in sample.allocators:
        held = one.step_peak_bytes or one.allocated_peak_bytes
        if one.alive and one.world_size > 1 and held is not None:
            jobs[one.job].append(float(held))
    for job, held_by_rank in jobs.items():
        yield "rank_imbalance_ratio", job, imbalance(held_by_rank)


def _of_host(sample: Sample) -> _Found:
    host = sample.host
    if host is None:
        return
    if host.shm_total_bytes and host.shm_used_bytes is not None:
        yield "shm_used_ratio", "host", host.shm_used_bytes / host.shm_total_bytes
    if host.total_bytes and host.available_bytes is not None:
        yield "host_used_ratio", "host", 1 - host.available_bytes / host.total_bytes
