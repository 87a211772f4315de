"""Run folders: what `memfit.watch()` writes in each process of a job, and how monitors read it meanwhile.

    RUN/00000-4711/process.json      whose records these are, since when, until when
                   host/…            host memory over time (see `memfit.monitor.history`)
                   gpu0/…            the allocator on one device over time
                   steps/…           every training step
                   sites-gpu0.json   the places that hold most, where they are known

A reader needs nothing of the writer but these files: a process that was killed leaves all that it knew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError
from memfit.core.files import write_atomically
from memfit.monitor.history import STEP_TIERS, TIERS, History, HistoryWriter
from memfit.monitor.identity import Identity
from memfit.monitor.ring import last_row
from memfit.monitor.samples import AllocatorSample, HostSample, Sample, Site, Step, process_key

SCHEMA = "memfit-run"
SCHEMA_VERSION = 1
PROCESS_FILE = "process.json"
STALE_SECONDS = 10.0
"""A record that has had nothing new for so long, and for five intervals, is of a process that died."""
MOST_RUNS_KEPT = 50

POOL_COLUMNS = ("small_allocated_bytes", "large_allocated_bytes")
ALLOCATOR_COLUMNS = (
    "requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes",
    "allocated_peak_bytes", "reserved_peak_bytes", "run_peak_bytes", "segments",
    "live_blocks", "alloc_retries", "ooms",
    "device_allocs", "device_frees", "allocated_total_bytes", "free_cached_bytes", "largest_free_bytes",
    "steps", "step_seconds", "step_peak_bytes", "step_end_bytes", "total_bytes",
)  # fmt: skip
HOST_COLUMNS = tuple(one.name for one in fields(HostSample) if one.name != "unknown")
STEP_COLUMNS = ("number", "seconds", "peak_bytes", "end_bytes")
_SECONDS = frozenset({"step_seconds"})


class RunWriter:
    """Writes the records of this process into a run folder.

    Args:
        folder: of the run; all processes of a job may share one.
        identity: whose records they are.
        interval_seconds: how often samples come.
    """

    def __init__(self, folder: Path, identity: Identity, *, interval_seconds: float) -> None:
        self.folder = folder / f"{identity.rank:05d}-{identity.pid}"
        self._about: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **asdict(identity),
            "script": sys.argv[0] if sys.argv else "",
            "interval_seconds": interval_seconds,
            "started_seconds": time.time(),
            "ended_seconds": None,
            "torch": getattr(sys.modules.get("torch"), "__version__", None),
            "devices": {},
        }
        self._histories: dict[str, HistoryWriter] = {}
        self._sites: dict[str, tuple[Site, ...]] = {}
        self._save()

    def write(self, sample: Sample) -> None:
        """Append a sample of this process."""
        if sample.host is not None:
            self._history("host", HOST_COLUMNS).append(
                sample.time_seconds, _figures(sample.host, HOST_COLUMNS)
            )
        for allocator in sample.allocators:
            name = f"gpu{allocator.index}"
            self._note_device(name, allocator)
            values = _figures(allocator, ALLOCATOR_COLUMNS)
            pools = (allocator.allocated_by_pool.get(pool) for pool in ("small", "large"))
            values |= dict(zip(POOL_COLUMNS, pools, strict=True))
            self._history(name, (*ALLOCATOR_COLUMNS, *POOL_COLUMNS)).append(sample.time_seconds, values)
            self._write_sites(name, allocator.sites)

    def write_step(self, step: Step) -> None:
        """Append one training step."""
        values = {name: getattr(step, name) for name in STEP_COLUMNS}
        self._history("steps", STEP_COLUMNS, STEP_TIERS).append(step.time_seconds, values)

    def close(self, *, ended: bool = True) -> None:
        """Close the files; say that the process ended, unless it only stops to write (in a fork)."""
        if ended:
            self._about["ended_seconds"] = time.time()
            self._save()
        for history in self._histories.values():
            history.close()

    def _history(self, name: str, columns: Sequence[str], tiers: Any = TIERS) -> HistoryWriter:
        if name not in self._histories:
            self._histories[name] = HistoryWriter(self.folder / name, columns, tiers)
        return self._histories[name]

    def _note_device(self, name: str, allocator: AllocatorSample) -> None:
        if name not in self._about["devices"]:
            self._about["devices"][name] = {"index": allocator.index, "uuid": allocator.uuid}
            self._about["torch"] = getattr(sys.modules.get("torch"), "__version__", None)
            self._save()

    def _write_sites(self, name: str, sites: tuple[Site, ...]) -> None:
        if sites != self._sites.get(name, ()):
            self._sites[name] = sites
            content = json.dumps([asdict(site) for site in sites])
            write_atomically(self.folder / f"sites-{name}.json", content)

    def _save(self) -> None:
        write_atomically(self.folder / PROCESS_FILE, json.dumps(self._about, indent=1))


def _figures(value: Any, names: Sequence[str]) -> dict[str, float | int | None]:
    return {name: getattr(value, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The records of one process: a folder of a run, and what its `PROCESS_FILE` says."""

    folder: Path
    about: Mapping[str, Any]

    @property
    def devices(self) -> Mapping[str, Mapping[str, Any]]:
        """Per device folder (``"gpu0"``), which device it is."""
        told = self.about.get("devices")
        return told if isinstance(told, dict) else {}

    @property
    def ended_seconds(self) -> float | None:
        """When the process said that it ends; None where it runs, or was killed."""
        told = self.about.get("ended_seconds")
        return float(told) if isinstance(told, int | float) else None

    @property
    def interval_seconds(self) -> float:
        """How often it writes."""
        told = self.about.get("interval_seconds")
        return float(told) if isinstance(told, int | float) else 1.0

    def history(self, name: str) -> History:
        """``"host"``, ``"gpu0"`` … or ``"steps"`` over time."""
        return History(self.folder / name, STEP_TIERS if name == "steps" else TIERS)

    def last_seconds(self) -> float:
        """When it last wrote a sample; 0 for never."""
        newest = last_row(self.folder / "host" / f"{TIERS[0].name}.ring")
        return newest[0] if newest else 0.0

    def alive(self, now_seconds: float) -> bool:
        """Whether the process still writes."""
        age = now_seconds - self.last_seconds()
        return self.ended_seconds is None and age < max(STALE_SECONDS, 5 * self.interval_seconds)

    def allocator(self, name: str, values: Mapping[str, float], *, alive: bool = True) -> AllocatorSample:
        """The allocator on one device, from a row of its history."""
        device, about = self.devices.get(name, {}), self.about
        pools = {
            pool: int(values[column])
            for pool, column in zip(("small", "large"), POOL_COLUMNS, strict=True)
            if not math.isnan(values.get(column, math.nan))
        }
        return AllocatorSample(
            job=str(about.get("job", "")),
            rank=_whole(about.get("rank")),
            local_rank=_whole(about.get("local_rank")),
            world_size=_whole(about.get("world_size"), 1),
            pid=_whole(about.get("pid")),
            host=str(about.get("host", "")),
            index=_whole(device.get("index")),
            uuid=str(device.get("uuid", "")),
            **{column: number_of(column, values.get(column)) for column in ALLOCATOR_COLUMNS},  # type: ignore[arg-type]
            allocated_by_pool=pools,
            sites=self.sites(name),
            alive=alive,
        )

    def sites(self, name: str) -> tuple[Site, ...]:
        """The places that hold most on a device, where they are known."""
        try:
            told = json.loads((self.folder / f"sites-{name}.json").read_bytes())
            return tuple(Site(**site) for site in told)
        except (OSError, ValueError, TypeError):
            return ()

    @property
    def key(self) -> str:
        """`AllocatorSample.process_key` of the process."""
        about = self.about
        job, host = str(about.get("job", "")), str(about.get("host", ""))
        return process_key(job, host, _whole(about.get("rank")), _whole(about.get("pid")))


def _whole(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def number_of(column: str, value: float | None) -> float | int | None:
    """A value of a row as it was before it was written: whole, but for seconds; NaN is unknown."""
    if value is None or math.isnan(value):
        return None
    return value if column in _SECONDS else int(value)


def read_records(folder: Path, *, leave_out: Container[Path] = ()) -> list[Record]:
    """The processes of one run, by rank; ``leave_out`` has folders of processes that are not wanted."""
    found = []
    for path in sorted(folder.glob(f"*/{PROCESS_FILE}")):
        if path.parent in leave_out:
            continue
        try:
            about = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # being made, or being taken away
        if isinstance(about, dict) and about.get("schema") == SCHEMA:
            found.append(Record(folder=path.parent, about=about))
    return found


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has records of a run in it."""
    return folder.is_dir() and bool(read_records(folder))


class RunSource:
    """Reads the newest records of one run, or of all runs below a folder that are alive.

    Args:
        folder: of a run, or the folder that runs are kept in.
        only_alive: leave out processes that no longer write.
    """

    name = "records of memfit.watch"

    def __init__(self, folder: Path, *, only_alive: bool = False) -> None:
        self.folder = folder
        self._only_alive = only_alive
        self._steps_read: dict[str, int] = {}
        self._over: set[Path] = set()

    def records(self, now_seconds: float) -> list[Record]:
        """The processes that are shown. Those that have ended are not looked at again where only the living
        count: a machine may have hundreds."""
        found = read_records(self.folder, leave_out=self._over)
        if not found and self.folder.is_dir():
            runs = (run for run in sorted(self.folder.iterdir()) if run.is_dir())
            found = [record for run in runs for record in read_records(run, leave_out=self._over)]
        if not self._only_alive:
            return found
        self._over |= {record.folder for record in found if record.ended_seconds is not None}
        return [record for record in found if record.alive(now_seconds)]

    def read(self, now_seconds: float) -> Sample:
        """The newest row of every process and device, and the steps since the last call."""
        allocators: list[AllocatorSample] = []
        steps: list[Step] = []
        hosts: list[tuple[float, HostSample]] = []
        for record in self.records(now_seconds):
            alive = record.alive(now_seconds)
            for name in record.devices:
                newest = last_row(record.folder / name / f"{TIERS[0].name}.ring")
                if newest is not None:
                    allocators.append(record.allocator(name, newest[1], alive=alive))
            host = last_row(record.folder / "host" / f"{TIERS[0].name}.ring")
            if host is not None:
                known = {name: number_of(name, host[1].get(name)) for name in HOST_COLUMNS}
                hosts.append((host[0], HostSample(**known)))  # type: ignore[arg-type]
            steps += self._new_steps(record)
        notes = () if hosts or self._only_alive else (f"{self.folder} has no records of memfit.watch()",)
        latest = max(hosts, key=lambda pair: pair[0], default=(now_seconds, None))
        return Sample(
            time_seconds=latest[0],
            allocators=tuple(allocators),
            host=latest[1],
            steps=tuple(steps),
            notes=notes,
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _new_steps(self, record: Record) -> list[Step]:
        history = record.history("steps")
        if not history:
            return []
        rows = history.samples(after=self._steps_read.get(record.key, 0))
        if len(rows):
            self._steps_read[record.key] = int(rows.number[-1])
        return list(
            steps_of(record.key, rows.time_seconds.tolist(), {k: v.tolist() for k, v in rows.values.items()})
        )


def steps_of(key: str, times: Sequence[float], values: Mapping[str, Sequence[float]]) -> list[Step]:
    """Rows of a steps history as values."""
    columns = [values[name] for name in STEP_COLUMNS]
    return [
        Step(
            key=key,
            number=int(number),
            time_seconds=at,
            seconds=None if math.isnan(seconds) else seconds,
            peak_bytes=None if math.isnan(peak) else int(peak),
            end_bytes=None if math.isnan(end) else int(end),
        )
        for at, number, seconds, peak, end in zip(times, *columns, strict=True)
    ]


def find_run(text: str | os.PathLike[str]) -> Path:
    """The run folder that ``text`` names.

    Raises:
        InputError: there is none.
    """
    folder = Path(text)
    if not is_run_folder(folder):
        raise InputError(f"{folder} is no run folder: it has no {PROCESS_FILE} of memfit.watch() in it")
    return folder


def forget_old_runs(folder: Path, *, keep: int = MOST_RUNS_KEPT) -> None:
    """Take away the oldest runs below ``folder`` that have ended, until ``keep`` are left."""
    runs = [run for run in folder.iterdir() if run.is_dir() and read_records(run)]
    runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    now = time.time()
    for run in runs[keep:]:
        if not any(record.alive(now) for record in read_records(run)):
            shutil.rmtree(run, ignore_errors=True)
