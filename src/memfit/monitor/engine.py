"""The monitor: asks all sources, keeps history, judges alerts; one `Status` a poll."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from memfit.monitor.account import AccountPart, account
from memfit.monitor.actions import Action, Dispatcher
from memfit.monitor.alert_record import AlertRecord
from memfit.monitor.alerts import Alert, AlertBook, Change
from memfit.monitor.history import HistoryWriter
from memfit.monitor.identity import plain_name
from memfit.monitor.quantities import Quantity, Trend, Trends, quantities
from memfit.monitor.rules import RULES, AlertRule
from memfit.monitor.runs import HOST_COLUMNS
from memfit.monitor.samples import AllocatorSample, DeviceSample, Sample, Source, device_of, merge, to_json

LOGGER = logging.getLogger("memfit.monitor")
SCHEMA_VERSION = 1
RECENT_POINTS = 240
MOST_CHANGES = 200
DEVICE_COLUMNS = (
    "total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "busy_ratio", "temperature_celsius",
    "power_watts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Status:
    """All that is known after one poll.

    Args:
        sample: of all sources, merged.
        accounts: per device key, the parts that add up to it.
        trends: per allocator key, how it grows.
        quantities: what alerts were judged by.
        firing: alerts that are on.
        changes: alerts that began or ended, the newest last, with when; at most `MOST_CHANGES`.
        earlier_changes: the same from before this monitor, off the disk, as plain values.
        fired_count: per rule, how often it fired since the monitor began.
        recent: per device and allocator key, the last values of used or allocated bytes.
        poll_seconds: how long asking took.
        errors: how many readings failed since the monitor began.
    """

    sample: Sample
    accounts: Mapping[str, Sequence[AccountPart]]
    trends: Mapping[str, Trend]
    quantities: Sequence[Quantity]
    firing: Sequence[Alert]
    changes: Sequence[tuple[float, Change]]
    earlier_changes: Sequence[Mapping[str, Any]] = ()
    fired_count: Mapping[str, int]
    recent: Mapping[str, Sequence[float]]
    poll_seconds: float
    errors: int

    def to_json(self) -> dict[str, Any]:
        """One object: bytes as integers, seconds as floats, unknown figures as null with their reasons."""
        sample = self.sample
        return {
            "schema_version": SCHEMA_VERSION,
            "time_seconds": sample.time_seconds,
            "devices": [
                {**to_json(device), "account": _account_json(self.accounts.get(device.key, ()))}
                for device in sample.devices
            ],
            "processes": to_json(sample.processes),
            "allocators": [
                {**to_json(one), "trend": trend_json(self.trends.get(one.key))} for one in sample.allocators
            ],
            "host": to_json(sample.host),
            "alerts": [alert.to_json() for alert in self.firing],
            "notes": list(sample.notes),
        }


def _account_json(parts: Sequence[AccountPart]) -> list[dict[str, Any]]:
    return [{"part": part.key, "label": part.label, "bytes": part.held_bytes} for part in parts]


def trend_json(trend: Trend | None) -> dict[str, float | int | None] | None:
    """Growth as JSON; no growth has no time at which memory is full."""
    if trend is None:
        return None
    seconds = trend.seconds_to_oom
    return {
        "growth_bytes_per_step": trend.per_step.bytes_per_unit if trend.per_step else None,
        "growth_bytes_per_second": trend.per_second.bytes_per_unit if trend.per_second else None,
        "room_bytes": trend.room_bytes,
        "seconds_to_oom": None if seconds is None or math.isinf(seconds) else seconds,
    }


class Monitor:
    """Polls sources and judges alerts.

    Args:
        sources: where samples come from; one that fails is left out of that poll, with a note.
        rules: alerts.
        actions: what they do.
        history: folder to keep devices, the host and alerts in over time; one monitor at a time writes
            there.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        rules: Sequence[AlertRule] = RULES,
        actions: Sequence[Action] = (),
        history: Path | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.book = AlertBook(rules)
        self.errors = 0
        self._trends = Trends()
        self._dispatcher = Dispatcher(actions)
        self._changes: deque[tuple[float, Change]] = deque(maxlen=MOST_CHANGES)
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_POINTS))
        self._history = None if history is None else DeviceHistory(history)
        self._record = (
            None if self._history is None else AlertRecord(self._history.folder, writes=self._history.writes)
        )

    @property
    def failures(self) -> int:
        """How many actions of alerts failed."""
        return self._dispatcher.failures

    def poll(self, now_seconds: float | None = None) -> Status:
        """Ask every source once."""
        now = time.time() if now_seconds is None else now_seconds
        began = time.perf_counter()
        sample = merge([self._read(source, now) for source in self.sources], now)
        self._trends.add(sample)
        found = quantities(sample, self._trends)
        for change in self.book.judge(found, sample.time_seconds):
            self._changes.append((sample.time_seconds, change))
            if self._record is not None:
                self._record.add(sample.time_seconds, change)
            self._dispatcher.tell(change)
        self._remember(sample)
        return Status(
            sample=sample,
            accounts={device.key: self._account(device, sample) for device in sample.devices},
            trends={
                one.key: self._trends.trend(one, device_of(one, sample.devices)) for one in sample.allocators
            },
            quantities=found,
            firing=self.book.firing,
            changes=tuple(self._changes),
            earlier_changes=() if self._record is None else self._record.earlier,
            fired_count=dict(self.book.fired_count),
            recent={key: tuple(values) for key, values in self._recent.items()},
            poll_seconds=time.perf_counter() - began,
            errors=self.errors,
        )

    def close(self) -> None:
        """Let waiting actions be done and close everything."""
        self._dispatcher.close()
        for source in self.sources:
            source.close()
        if self._history is not None:
            self._history.close()

    def _read(self, source: Source, now: float) -> Sample:
        try:
            return source.read(now)
        except Exception as error:  # noqa: BLE001  # a monitor outlives what it reads: it is said, and counted
            self.errors += 1
            LOGGER.debug("reading %s failed", source.name, exc_info=True)
            reason = f"{source.name} could not be read: {type(error).__name__}: {error}"
            return Sample(time_seconds=now, notes=(reason,))

    def _account(self, device: DeviceSample, sample: Sample) -> list[AccountPart]:
        watched = [one for one in sample.allocators if one.alive and device_of(one, sample.devices) is device]
        processes = [one for one in sample.processes if one.device == device.key]
        return account(device, watched, processes)

    def _remember(self, sample: Sample) -> None:
        for device in sample.devices:
            self._recent[device.key].append(
                math.nan if device.used_bytes is None else float(device.used_bytes)
            )
        for one in sample.allocators:
            self._recent[one.key].append(_plotted(one))
        if self._history is not None:
            self._history.append(sample)


def _plotted(one: AllocatorSample) -> float:
    return math.nan if one.allocated_bytes is None else float(one.allocated_bytes)


class DeviceHistory:
    """Devices and the host over time, in a folder; where another monitor writes it, this one does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, HistoryWriter] = {}
        self._lock = _lock(folder)
        self.writes = self._lock is not None

    def append(self, sample: Sample) -> None:
        """Add the devices and the host of a sample."""
        if self._lock is None:
            return
        for device in sample.devices:
            writer = self._writer(f"gpu-{plain_name(device.key)}", DEVICE_COLUMNS)
            writer.append(sample.time_seconds, {name: getattr(device, name) for name in DEVICE_COLUMNS})
        if sample.host is not None:
            values = {
                one.name: getattr(sample.host, one.name)
                for one in fields(sample.host)
                if one.name != "unknown"
            }
            self._writer("host", HOST_COLUMNS).append(sample.time_seconds, values)

    def close(self) -> None:
        """Close the files and let others write."""
        for writer in self._writers.values():
            writer.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _writer(self, name: str, columns: Sequence[str]) -> HistoryWriter:
        if name not in self._writers:
            self._writers[name] = HistoryWriter(self.folder / name, columns)
        return self._writers[name]


def _lock(folder: Path) -> IO[bytes] | None:
    """The folder's lock, held until it is closed or the process ends; None where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "writer.lock", "ab")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows: the last writer wins
        return file
    except OSError:
        file.close()
        return None
    os.set_inheritable(file.fileno(), False)
    with contextlib.suppress(OSError):
        file.truncate(0)
    return file
