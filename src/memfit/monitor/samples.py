"""What is known of memory at one moment: devices, their processes, allocators, the host.

Every source gives `Sample` values, whatever it reads: the driver, PyTorch's allocator, a record, a trace. A
figure that a source cannot know is ``None``, with the reason in ``unknown``; it is never a made-up 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class DeviceSample:
    """One GPU, or one MIG instance of it, as the driver sees it.

    Args:
        index: what CUDA and nvidia-smi call it.
        uuid: the driver's name for it, also over restarts; empty where unknown.
        name: the model.
        driver: version of the driver.
        mig: the profile of a MIG instance (``"1g.10gb"``), else empty.
        total_bytes: reserved + used + free.
        used_bytes: what all processes have.
        free_bytes: what nobody has.
        reserved_bytes: what the driver keeps for itself.
        busy_ratio: share of the last moment in which a kernel ran, 0 to 1.
        temperature_celsius, power_watts: of the chip.
        unknown: for each figure that is ``None``, why.
    """

    index: int
    uuid: str = ""
    name: str = ""
    driver: str = ""
    mig: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    busy_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``"gpu0"``, or ``"gpu0:1g.10gb"`` for a MIG instance."""
        return f"gpu{self.index}:{self.mig}" if self.mig else f"gpu{self.index}"

    @property
    def key(self) -> str:
        """What it is kept under: the same over restarts, different for two instances of one GPU."""
        return self.uuid or self.label


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """One process on one device, as the driver sees it.

    Args:
        device: `DeviceSample.key` of the device.
        pid: as the driver says; inside a container that is the host's number.
        name: of the program; ``None`` where it cannot be known from here.
        used_bytes: all that it has on the device: context, libraries and PyTorch's segments.
        unknown: for each figure that is ``None``, why.
    """

    device: str
    pid: int
    name: str | None = None
    used_bytes: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place in the program and what it holds."""

    where: str
    held_bytes: int
    block_count: int = 0
    category: str = ""
    module: str = ""


def process_key(job: str, host: str, rank: int, pid: int) -> str:
    """One name for a process among those of all jobs."""
    return f"{job}/{host}/{rank}/{pid}"


@dataclass(frozen=True, kw_only=True)
class AllocatorSample:
    """PyTorch's caching allocator in one process on one device.

    Args:
        job, rank, local_rank, world_size, pid, host: whose it is.
        index, uuid: the device; ``uuid`` is empty where unknown.
        requested_bytes: what tensors asked for.
        allocated_bytes: the blocks that hold it.
        active_bytes: these, and blocks that wait for another stream.
        reserved_bytes: segments taken from the device.
        inactive_split_bytes: free pieces of segments that are in use elsewhere; they cannot be given back.
        allocated_by_pool: ``{"small": …, "large": …}``, where known.
        allocated_peak_bytes, reserved_peak_bytes: since PyTorch's peak counters were last reset.
        run_peak_bytes: the most that was allocated since it is watched, however often those were reset.
        segments, live_blocks: how many there are.
        alloc_retries, ooms, device_allocs, device_frees: counted since the process began.
        allocated_total_bytes: all that was ever allocated.
        free_cached_bytes, largest_free_bytes: in the cache, when it was last looked at.
        steps: training steps so far; ``None`` where nobody counts them.
        step_seconds, step_peak_bytes, step_end_bytes: of the last whole step; the end's are allocated bytes.
        by_category: requested bytes by category, where known.
        sites: the places that hold most, where known.
        total_bytes: memory of the device, where this source knows it.
        alive: whether the process still runs.
        unknown: for each figure that is ``None``, why.
    """

    job: str = ""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    pid: int = 0
    host: str = ""
    index: int = 0
    uuid: str = ""
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    allocated_by_pool: Mapping[str, int] = field(default_factory=dict)
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    run_peak_bytes: int | None = None
    segments: int | None = None
    live_blocks: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    device_allocs: int | None = None
    device_frees: int | None = None
    allocated_total_bytes: int | None = None
    free_cached_bytes: int | None = None
    largest_free_bytes: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    step_peak_bytes: int | None = None
    step_end_bytes: int | None = None
    by_category: Mapping[str, int] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    total_bytes: int | None = None
    alive: bool = True
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``"train rank 3 gpu1"``."""
        rank = f"rank {self.rank}" if self.world_size > 1 else f"pid {self.pid}" if self.pid else ""
        return " ".join(part for part in (self.job, rank, f"gpu{self.index}") if part)

    @property
    def process_key(self) -> str:
        """What the steps of its process are kept under."""
        return process_key(self.job, self.host, self.rank, self.pid)

    @property
    def key(self) -> str:
        """What it is kept under: one process on one device."""
        return f"{self.process_key}/gpu{self.index}"

    @property
    def cached_bytes(self) -> int | None:
        """Reserved, but in no tensor's use."""
        held = self.active_bytes if self.active_bytes is not None else self.allocated_bytes
        if self.reserved_bytes is None or held is None:
            return None
        return max(0, self.reserved_bytes - held)

    @property
    def fragmentation_ratio(self) -> float | None:
        """1 - largest free piece / all free pieces of the cache: 0 is one piece, near 1 many small ones."""
        if self.largest_free_bytes is None or self.free_cached_bytes is None:
            return None
        return 1 - self.largest_free_bytes / self.free_cached_bytes if self.free_cached_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """The machine that the GPUs are in, and this or the watched processes on it.

    Args:
        total_bytes, available_bytes: main memory.
        rss_bytes: resident memory of the processes that are watched.
        shm_total_bytes, shm_used_bytes: ``/dev/shm``, through which data loaders pass batches.
        pinned_bytes: page-locked memory of PyTorch's host allocator.
        unknown: for each figure that is ``None``, why.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    rss_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_used_bytes: int | None = None
    pinned_bytes: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one process.

    Args:
        key: `AllocatorSample.process_key` of the process.
        number: counted from 1.
        time_seconds: Unix time at its end.
        seconds: how long it took.
        peak_bytes: the most that was allocated in it.
        end_bytes: what was allocated at its end.
    """

    key: str
    number: int
    time_seconds: float
    seconds: float | None = None
    peak_bytes: int | None = None
    end_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All that one source, or all of them together, know at one moment.

    Args:
        time_seconds: Unix time of the reading (or of the record that is played back).
        steps: those that ended since the last reading.
        notes: what could not be looked at, and why; a sentence each.
        ended: whether the source will have nothing new: a playback at its end.
    """

    time_seconds: float
    devices: tuple[DeviceSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    allocators: tuple[AllocatorSample, ...] = ()
    host: HostSample | None = None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    ended: bool = False


class Source(Protocol):
    """Where samples come from."""

    @property
    def name(self) -> str:
        """What it reads, in a word or two."""

    def read(self, now_seconds: float) -> Sample:
        """What is known now. Never synchronises a device; what it cannot know is ``None``."""

    def close(self) -> None:
        """Give back what it holds open."""


def merge(samples: Sequence[Sample], now_seconds: float) -> Sample:
    """One sample of what all sources know; of a device that several know, the figures that are known.

    Devices that only an allocator knows of are added, so that a trace or a record shows without a driver.
    """
    devices: dict[str, DeviceSample] = {}
    for sample in samples:
        for device in sample.devices:
            devices.setdefault(device.key, device)
    allocators = tuple(one for sample in samples for one in sample.allocators)
    for allocator in allocators:
        if device_of(allocator, tuple(devices.values())) is None:
            made = _device_that_is_told_of(allocator)
            devices[made.key] = made
    hosts = [sample.host for sample in samples if sample.host is not None]
    return Sample(
        time_seconds=max((sample.time_seconds for sample in samples), default=now_seconds),
        devices=tuple(sorted(devices.values(), key=lambda device: (device.index, device.mig, device.key))),
        processes=tuple(one for sample in samples for one in sample.processes),
        allocators=tuple(sorted(allocators, key=lambda one: (one.job, one.rank, one.index, one.pid))),
        host=hosts[0] if hosts else None,
        steps=tuple(step for sample in samples for step in sample.steps),
        notes=tuple(dict.fromkeys(note for sample in samples for note in sample.notes)),
        ended=bool(samples) and all(sample.ended for sample in samples),
    )


def device_of(allocator: AllocatorSample, devices: Sequence[DeviceSample]) -> DeviceSample | None:
    """The device that an allocator is on: by UUID where both know it, else by number."""
    if allocator.uuid:
        for device in devices:
            if device.uuid == allocator.uuid:
                return device
    same = [device for device in devices if device.index == allocator.index and not device.mig]
    return next((device for device in same if not (device.uuid and allocator.uuid)), None)


def _device_that_is_told_of(allocator: AllocatorSample) -> DeviceSample:
    total, used = allocator.total_bytes, allocator.reserved_bytes
    reason = "no driver was asked: this is a record or a trace"
    known = {"total_bytes": total, "used_bytes": used}
    free = None if total is None or used is None else max(0, total - used)
    unknown = {name: reason for name, value in {**known, "free_bytes": free}.items() if value is None}
    return DeviceSample(
        index=allocator.index,
        uuid=allocator.uuid,
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        unknown={**unknown, "busy_ratio": reason},
    )


def to_json(value: Any) -> Any:
    """A sample, or a part of one, as plain JSON values; derived labels of devices and allocators included."""
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, DeviceSample | AllocatorSample):
        derived = {"label": value.label, "key": value.key}
        if isinstance(value, AllocatorSample):
            derived |= {"cached_bytes": value.cached_bytes, "fragmentation_ratio": value.fragmentation_ratio}  # type: ignore[dict-item]
        return {**derived, **{one.name: to_json(getattr(value, one.name)) for one in fields(value)}}
    if hasattr(value, "__dataclass_fields__"):
        return {one.name: to_json(getattr(value, one.name)) for one in fields(value)}
    return value
