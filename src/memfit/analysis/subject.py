"""What is analysed: whatever is at hand of a job, put together, each source read as what it is."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import InputError, UsageError
from memfit.core.exactness import Exactness
from memfit.core.recording import Recording
from memfit.core.snapshot import Snapshot
from memfit.core.trace import Trace, TraceBuilder
from memfit.core.units import parse_bytes
from memfit.core.workload import Workload
from memfit.formats import read_trace
from memfit.formats.operator_times import OperatorTimes, read_operator_times
from memfit.profiling.profile import PROFILE_FILE, Profile

if TYPE_CHECKING:
    from memfit.planning.oracle import StepOracle

WORKLOAD_PREFIXES = ("hf:", "tv:")
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A job as far as it is known.

    Attributes:
        name: what it is called.
        recording: its allocation events, or its snapshot.
        profile: its profile.
        graph: one captured step.
        times: what torch.profiler measured.
        workload: how to build its step, or the text that says so.
        gpu: the GPU that it is for.
        budget_bytes: what PyTorch may reserve of it.
        allow: how far techniques that are tried may move the results.
        oracle: where the workload's step can be tried, while it is open.
    """

    name: str = ""
    recording: Recording | None = None
    profile: Profile | None = None
    graph: StepGraph | None = None
    times: OperatorTimes | None = None
    workload: Workload | str | None = None
    gpu: GPU | None = None
    budget_bytes: int | None = None
    allow: Exactness = "approximate"
    oracle: StepOracle | None = None

    @classmethod
    def of(
        cls,
        *sources: Any,
        gpu: GPU | str | None = None,
        budget: int | str | None = None,
        allow: Exactness = "approximate",
    ) -> Subject:
        """Put sources together.

        Args:
            sources: a `Trace`, `Recording`, `Snapshot`, `Profile`, `MemoryProfiler`, `StepGraph`, `Workload`,
                or a path of a file or folder with one of them, or a workload's text.
            gpu: the GPU, or its name.
            budget: what PyTorch may reserve, as bytes or text.
            allow: how far techniques that are tried may move the results.

        Raises:
            UsageError: a source of another kind, or two of one kind.
            InputError: a file that cannot be read.
        """
        found = cls(
            gpu=find_gpu(gpu) if isinstance(gpu, str) else gpu,
            budget_bytes=None if budget is None else parse_bytes(budget, what="budget"),
            allow=allow,
        )
        for source in sources:
            if isinstance(source, Subject):
                found = source if found.gpu is None else replace(source, gpu=found.gpu)
                continue
            known, name = _read(source)
            twice = [key for key in known if getattr(found, key) is not None]
            if twice:
                raise UsageError(f"two sources of one kind ({twice[0]}): analyse them one after another")
            found = replace(found, name=found.name or name, **known)
        return found

    @property
    def trace(self) -> Trace | None:
        """The allocation events; of a profile, or of the captured step, where nothing was recorded."""
        if self.recording is not None:
            return self.recording.trace
        if self.profile is not None:
            return self.profile.trace
        return None if self.graph is None else self.graph.to_trace()

    @property
    def capacity_bytes(self) -> int | None:
        """What PyTorch can have of the device: the budget, else of the GPU, else what the file says."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.gpu is not None:
            return self.gpu.runtime_total_bytes - self.gpu.context_bytes
        return None if self.recording is None else self.recording.total_bytes

    def kinds(self) -> tuple[str, ...]:
        """Which kinds of source there are."""
        names = ("recording", "profile", "graph", "times", "workload")
        return tuple(name for name in names if getattr(self, name) is not None)

    def with_graph(self) -> Subject:
        """The same with the step of its workload captured, where there is one and it was not yet.

        On the made-up GPU where there is one and a GPU was named, else on the CPU.
        """
        if self.graph is not None or self.workload is None:
            return self
        if self.oracle is not None:
            return replace(self, graph=self.oracle.graph(()))
        from memfit.analysis.capturing import captured

        return replace(self, graph=captured(self.workload, self.gpu))


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """The fields that a source fills, and its name."""
    by_type: tuple[tuple[type, str], ...] = (
        (Recording, "recording"), (Profile, "profile"), (StepGraph, "graph"),
        (OperatorTimes, "times"), (Workload, "workload"),
    )  # fmt: skip
    for kind, key in by_type:
        if isinstance(source, kind):
            return {key: source}, str(getattr(source, "name", ""))
    if isinstance(source, Trace):
        return {"recording": Recording(trace=source)}, str(source.meta.get("name", ""))
    if isinstance(source, Snapshot):
        trace = source.trace if source.trace is not None else TraceBuilder().build()
        return {"recording": Recording(trace=trace, end=source, kind="memory-snapshot")}, ""
    if hasattr(source, "get_memory_usage") and hasattr(source, "profile"):
        return {"profile": source.profile()}, ""
    if isinstance(source, (str, os.PathLike)):
        return _read_path(os.fspath(source))
    raise UsageError(
        f"cannot analyse a {type(source).__name__}: give a Trace, Recording, Snapshot, Profile, StepGraph or "
        "Workload, the path of a file with one, or a workload's text"
    )


def _read_path(text: str) -> tuple[dict[str, Any], str]:
    path = Path(text)
    if path.is_dir():
        if not (path / PROFILE_FILE).exists():
            raise InputError(f"{text} is a folder without {PROFILE_FILE}: it is no profile of memfit's")
        return {"profile": Profile.load(path)}, path.name
    if not path.exists() and is_workload(text):
        return {"workload": text}, text
    head = _head(path)
    if b'"memfit-profile"' in head:
        return {"profile": Profile.load(path)}, path.absolute().parent.name
    if b'"traceEvents"' in head:
        return _profiler_trace(path), path.name
    if b'"schema_version"' in head:
        return _step_graph(path), path.name
    return {"recording": read_trace(path)}, path.name


def is_workload(text: str) -> bool:
    """Whether a text names a workload: ``hf:…``, ``tv:…`` or ``file.py:function``."""
    file, colon, _ = text.rpartition(":")
    return text.startswith(WORKLOAD_PREFIXES) or bool(colon and file.endswith(".py"))


def _head(path: Path) -> bytes:
    """The beginning of a JSON file, unpacked; empty for every other file, which other readers know."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            head: bytes = file.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return b""
    return head if head.lstrip()[:1] in (b"{", b"[") else b""


def _step_graph(path: Path) -> dict[str, Any]:
    """A step graph, or else a memory snapshot as JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if isinstance(data, dict) and "ops" in data and "storages" in data:
        return {"graph": StepGraph.from_json(data)}
    return {"recording": read_trace(path)}


def _profiler_trace(path: Path) -> dict[str, Any]:
    """A trace of torch.profiler: measured times, and memory events where it has them."""
    found: dict[str, Any] = {"times": read_operator_times(path)}
    try:
        found["recording"] = read_trace(path)
    except InputError:  # it was recorded without profile_memory=True
        return found
    return found


def graph_of(subject: Subject) -> StepGraph:
    """The captured step. UsageError where there is neither one nor a workload."""
    with_it = subject.with_graph()
    if with_it.graph is None:
        raise UsageError("this needs a captured step: give a StepGraph or a Workload")
    return with_it.graph
