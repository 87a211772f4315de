"""From what a user names to sources: this machine, a run folder, a trace or any other recording."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memfit.core.errors import InputError, UsageError
from memfit.core.recording import Recording
from memfit.monitor.host import HostSource
from memfit.monitor.identity import runs_folder
from memfit.monitor.nvml import NvmlSource
from memfit.monitor.playback import RunPlayback, TracePlayback
from memfit.monitor.runs import RunSource, is_run_folder, read_records
from memfit.monitor.samples import Source
from memfit.monitor.smi_output import read_smi_output


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What is monitored.

    Args:
        kind: this machine as it is now; a run folder whose processes still write; one that is over, or a
            trace.
        title: for people.
        sources: what a `Monitor` reads.
        run: the run folder, or the folder of all runs.
        recording: the trace, where it is one.
        whole: whether a record is shown all at once, not played.
    """

    kind: Literal["machine", "run", "recorded run", "trace"]
    title: str
    sources: Sequence[Source]
    run: Path | None = None
    recording: Recording | None = None
    whole: bool = False

    @property
    def live(self) -> bool:
        """Whether it happens now."""
        return self.kind in ("machine", "run")


def open_source(source: str | os.PathLike[str] | None = None, *, speed: float | None = None) -> Opened:
    """What ``source`` names.

    Args:
        source: None for this machine and all jobs with `memfit.watch()` on it; a run folder; a trace, a
            memory snapshot or another recording; what nvidia-smi printed (its table, CSV or XML).
        speed: plays a record: 1 is real time (of a trace, a step a second). Unless given, a record is shown
            whole.

    Raises:
        UsageError: a speed for what happens now, or one that is no speed.
        InputError: what is named is not there, or no record.
    """
    if speed is not None and not 0 < speed < math.inf:
        raise UsageError(f"--speed {speed:g}: give a number above 0; 1 is real time")
    if source is None:
        return _machine(speed)
    path = Path(source)
    if path.is_dir():
        return _run(path, speed)
    output = read_smi_output(path)
    if output is not None:
        return Opened(kind="recorded run", title=path.name, sources=(output,), whole=True)
    from memfit.formats import read_trace

    recording = read_trace(path)
    playback = TracePlayback(recording, speed=math.inf if speed is None else speed, job=path.stem)
    return Opened(
        kind="trace", title=path.name, sources=(playback,), recording=recording, whole=speed is None
    )


def _machine(speed: float | None) -> Opened:
    if speed is not None:
        raise UsageError("--speed is for records: name one with --source")
    runs = RunSource(runs_folder(), only_alive=True)
    sources = (NvmlSource(), HostSource(lambda: _pids(runs)), runs)
    return Opened(kind="machine", title=socket.gethostname(), sources=sources, run=runs.folder)


def _run(folder: Path, speed: float | None) -> Opened:
    if not is_run_folder(folder):
        raise InputError(f"{folder} is no run folder: no process of memfit.watch() has written there")
    here = any(record.alive(time.time()) for record in read_records(folder))
    if here and speed is None:
        runs = RunSource(folder)
        sources = (NvmlSource(), HostSource(lambda: _pids(runs)), runs)
        return Opened(kind="run", title=folder.name, sources=sources, run=folder)
    playback = RunPlayback(folder, speed=math.inf if speed is None else speed)
    return Opened(
        kind="recorded run", title=folder.name, sources=(playback,), run=folder, whole=speed is None
    )


def _pids(runs: RunSource) -> list[int]:
    """The watched processes of this machine."""
    here = socket.gethostname()
    abouts = (record.about for record in runs.records(time.time()))
    return [
        int(about["pid"])
        for about in abouts
        if about.get("host") == here and isinstance(about.get("pid"), int)
    ]
