"""Files of any kind as one case: what each is, its content tells."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.analysis.configuration import Configuration, configuration_of, environment_configuration
from memfit.analysis.evidence import Evidence, GpuProcess, GpuUsage, RankPeak
from memfit.core.errors import InputError, UsageError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.dryrun.result import DryRunResult
from memfit.formats import read_trace
from memfit.formats.messages_nvidia_smi import read_output

LARGEST_DOCUMENT_BYTES = 32 << 20
HEAD_BYTES = 1 << 16
TEXT_SUFFIXES = (".log", ".txt", ".err", ".out")
_BINARY = (b"PK\x03\x04", b"\x1f\x8b", b"\x80")
_TRACE_KEYS = ("traceEvents", "segments", "device_traces", "events")
_KNOWN = (
    "a trace or memory snapshot, a dry run's JSON, memory_stats as JSON, a configuration (Trainer, "
    "DeepSpeed, "
    "Accelerate, a model's config.json, memfit's), nvidia-smi's output, or a log"
)


@dataclass
class _Parts:
    """What the files gave so far."""

    recordings: list[tuple[str, Recording]] = field(default_factory=list)
    results: list[tuple[str, DryRunResult]] = field(default_factory=list)
    configuration: Configuration = field(default_factory=Configuration)
    statistics: list[Mapping[str, int]] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    gpus: list[GpuUsage] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def read_evidence(files: Sequence[str | os.PathLike[str]], *, live: bool = False) -> Evidence:
    """One case of all the files.

    Args:
        files: of one job; of several traces (or dry-run results) the highest is looked at, and all are
            compared as ranks.
        live: add what this process tells.

    Raises:
        InputError: a file is of no kind that is known, or damaged.
        UsageError: there is nothing to look at.
    """
    parts = _Parts()
    for file in files:
        _read(Path(file), parts)
    if live:
        from memfit.analysis.live import live_evidence

        return _joined(parts, files, live_evidence())
    if not files:
        raise UsageError("nothing to diagnose: name a file")
    return _joined(parts, files, None)


def read_job_file(path: str | os.PathLike[str]) -> Recording | DryRunResult:
    """A trace, a snapshot, or a dry run's JSON.

    Raises:
        InputError: it is none of them.
    """
    parts = _Parts()
    _read(Path(path), parts)
    if parts.recordings:
        return parts.recordings[0][1]
    if parts.results:
        return parts.results[0][1]
    raise InputError(f"{os.fspath(path)} is no trace, memory snapshot or dry-run result")


def _joined(parts: _Parts, files: Sequence[str | os.PathLike[str]], live: Evidence | None) -> Evidence:
    ranks = [RankPeak(name=name, peak_bytes=_peak(recording)) for name, recording in parts.recordings]
    if not ranks:
        ranks = [RankPeak(name=name, peak_bytes=run.peak_reserved_bytes) for name, run in parts.results]
    highest = max(range(len(ranks)), key=lambda place: ranks[place].peak_bytes, default=None)
    recording = parts.recordings[highest][1] if parts.recordings and highest is not None else None
    results = dict(parts.results)
    name = None if highest is None else ranks[highest].name
    result = results.get(name or "", parts.results[0][1] if parts.results else None)
    configuration = parts.configuration
    if result is not None:
        known = Configuration(torch=result.torch, context_bytes=result.context_bytes)
        configuration = known.merged(configuration)
    if live is not None:
        configuration = live.configuration.merged(configuration)
    return Evidence(
        recording=recording if recording is not None or live is None else live.recording,
        dry_run=result,
        configuration=configuration,
        statistics=tuple(parts.statistics) or (live.statistics if live else ()),
        processes=tuple(parts.processes) or (live.processes if live else ()),
        gpus=tuple(parts.gpus) or (live.gpus if live else ()),
        own_pids=live.own_pids if live else frozenset(),
        ranks=tuple(ranks) if len(ranks) > 1 else (),
        text="\n".join(parts.texts),
        kept=live.kept if live else (),
        names=tuple(os.fspath(file) for file in files) or ("this process",),
    )


def _peak(recording: Recording) -> int:
    """The highest reserved bytes of a recording, or else its live ones."""
    reserved = recording.recorded_peak_reserved_bytes
    return reserved if reserved else Timeline.of(recording.trace).peak_bytes


def _read(path: Path, parts: _Parts) -> None:
    size, head = _start_of(path)
    if not head or head.startswith(_BINARY) or size > LARGEST_DOCUMENT_BYTES:
        parts.recordings.append((path.name, read_trace(path)))
        return
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    value = _document(path, text)
    if value is not None:
        _take_document(path, value, parts)
    elif not _take_text(path, text, parts):
        parts.recordings.append((path.name, read_trace(path)))


def _start_of(path: Path) -> tuple[int, bytes]:
    """Size and first bytes of an ordinary file; of anything else none, which the reader of traces tells."""
    try:
        if not path.is_file():
            return 0, b""
        with path.open("rb") as file:
            return path.stat().st_size, file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _document(path: Path, text: str) -> Any:
    """The JSON or YAML that a text is; a list for JSON lines; ``None`` where it is neither."""
    start = text.lstrip()[:1]
    if start in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return _lines(text)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return None
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML without tags: {' '.join(str(error).split())}") from error


def _lines(text: str) -> list[Any] | None:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return None


def _take_document(path: Path, value: Any, parts: _Parts) -> None:
    samples = _statistics(value)
    if samples is not None:
        parts.statistics += samples
        return
    if isinstance(value, dict) and not any(key in value for key in _TRACE_KEYS):
        if "peak_reserved_bytes" in value and "engine" in value:
            parts.results.append((path.name, DryRunResult.from_json(value)))
            return
        found = configuration_of(value, name=str(path))
        if found is None and "environment" in value and isinstance(value["environment"], dict):
            texts = {str(key): str(item) for key, item in value["environment"].items()}
            found = environment_configuration(texts)
        if found is None:
            raise InputError(f"{path} is none of what memfit reads: {_KNOWN}")
        parts.configuration = parts.configuration.merged(found)
        return
    parts.recordings.append((path.name, read_trace(path)))


def _statistics(value: Any) -> list[Mapping[str, int]] | None:
    """Samples of ``torch.cuda.memory_stats()``: one, or a list of them."""
    rows = value if isinstance(value, list) else [value]
    mark = "allocated_bytes.all.current"
    if not rows or not all(
        isinstance(row, dict) and (mark in row or "num_alloc_retries" in row) for row in rows
    ):
        return None
    if "schema_version" in rows[0]:
        return None
    return [{str(key): item for key, item in row.items() if type(item) is int} for row in rows]


def _take_text(path: Path, text: str, parts: _Parts) -> bool:
    """nvidia-smi's output, or a log; whether it was one."""
    reading = (
        read_output(text)
        if path.suffix.lower() not in TEXT_SUFFIXES or "nvidia-smi" in text.lower()
        else None
    )
    if reading is not None:
        parts.gpus += [
            GpuUsage(gpu=row.index, used_bytes=row.used_bytes or 0, total_bytes=row.total_bytes or 0)
            for row in reading.devices
            if row.used_bytes is not None or row.total_bytes is not None
        ]
        parts.processes += [
            GpuProcess(gpu=row.gpu, pid=row.pid, name=row.name, used_bytes=row.used_bytes or 0)
            for row in reading.processes
            if row.pid is not None
        ]
        return True
    if (
        path.suffix.lower() in TEXT_SUFFIXES
        or "Traceback (most recent call last)" in text
        or "Error:" in text
    ):
        parts.texts.append(text)
        return True
    return False
