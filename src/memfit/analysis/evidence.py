"""The evidence of a case: whatever is at hand of a job's memory, and what the rules draw from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from memfit.allocators.lab import Replay
from memfit.allocators.lab import replay as run_replay
from memfit.analysis.blocks import Blocks, Mask, whole_trace
from memfit.analysis.configuration import Configuration
from memfit.analysis.growth import Growth, growth_of
from memfit.analysis.steps import phase_at_events, phase_runs, step_ends
from memfit.core.recording import Recording
from memfit.core.snapshot import Snapshot
from memfit.core.timeline import Timeline
from memfit.core.trace import Trace
from memfit.dryrun.result import DryRunResult

Need = Literal["trace", "snapshot", "configuration", "statistics", "processes", "ranks", "text", "live"]
"""What a rule looks at; a rule that names several needs one of them, and says more with more."""

MOST_REPLAYED_EVENTS = 300_000
"""Beyond this the allocator is not replayed: live bytes alone are compared."""
LARGEST_SOURCE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """What one process takes of one GPU, as nvidia-smi shows it."""

    gpu: str
    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """A GPU's memory, as nvidia-smi or ``mem_get_info`` shows it; 0 where it is not told."""

    gpu: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """The highest memory of one rank of a job."""

    name: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor of this process that something keeps alive, perhaps by mistake."""

    keeper: str
    size_bytes: int
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Whatever is at hand; what is not is empty.

    Attributes:
        recording: the events, and the segments at the end.
        dry_run: the account of a dry run.
        configuration: how the job is set up.
        statistics: samples of ``torch.cuda.memory_stats()``, in order of time.
        processes, gpus: what nvidia-smi shows.
        own_pids: processes of the job itself; empty: all that are shown.
        ranks: highest memory of each rank.
        text: an error or a log.
        kept: tensors of this process that tracebacks, closures and cycles keep.
        names: of the files, for the headline.
    """

    recording: Recording | None = None
    dry_run: DryRunResult | None = None
    configuration: Configuration = field(default_factory=Configuration)
    statistics: Sequence[Mapping[str, int]] = ()
    processes: Sequence[GpuProcess] = ()
    gpus: Sequence[GpuUsage] = ()
    own_pids: frozenset[int] = frozenset()
    ranks: Sequence[RankPeak] = ()
    text: str = ""
    kept: Sequence[Kept] = ()
    names: Sequence[str] = ()

    def with_trace(self, trace: Trace) -> Evidence:
        """The same case with another trace, and nothing that was recorded of the old one's layout."""
        assert self.recording is not None
        recording = Recording(
            trace=trace, total_bytes=self.recording.total_bytes, settings=self.recording.settings
        )
        return replace(self, recording=recording)

    @property
    def needs_met(self) -> frozenset[Need]:
        """What there is for rules to look at."""
        there: dict[Need, bool] = {
            "trace": self.trace is not None and len(self.trace) > 0,
            "snapshot": self.snapshot is not None,
            "configuration": bool(self.configuration.said) or self.dry_run is not None,
            "statistics": bool(self.statistics),
            "processes": bool(self.processes or self.gpus),
            "ranks": len(self.ranks) > 1,
            "text": bool(self.text) or (self.dry_run is not None and self.dry_run.error is not None),
            "live": bool(self.kept),
        }
        return frozenset(need for need, met in there.items() if met)

    @cached_property
    def trace(self) -> Trace | None:
        """The events, with what was held before them allocated at their beginning."""
        return None if self.recording is None else whole_trace(self.recording)

    @property
    def snapshot(self) -> Snapshot | None:
        """What the allocator held at the end, where the file has it."""
        return None if self.recording is None else self.recording.end

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes after every event. Only for cases with a trace."""
        assert self.trace is not None
        return Timeline.of(self.trace)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the trace. Only for cases with a trace."""
        assert self.trace is not None
        return Blocks.of(self.trace)

    @cached_property
    def step_ends(self) -> tuple[int, ...]:
        """The first event after each step."""
        return () if self.trace is None else step_ends(self.trace)

    @cached_property
    def phase_runs(self) -> list[tuple[str, int, int]]:
        """The phases one after another."""
        return [] if self.trace is None else phase_runs(self.trace)

    @cached_property
    def growth(self) -> Growth | None:
        """What piles up over the steps."""
        if self.trace is None or not len(self.trace):
            return None
        return growth_of(self.blocks, self.timeline.live_bytes, self.step_ends)

    @property
    def peak_bytes(self) -> int:
        """The most requested bytes live at once; of a case without a trace, what its dry run says."""
        if self.trace is not None:
            return self.timeline.peak_bytes
        return self.dry_run.peak_requested_bytes if self.dry_run is not None else 0

    @property
    def peak_phase(self) -> str:
        """The phase in which the live bytes are highest."""
        if self.trace is not None and len(self.trace):
            return str(self.trace.strings[phase_at_events(self.trace)[self.timeline.peak_index]])
        return ""

    @cached_property
    def live_at_peak(self) -> Mask:
        """Which blocks are live at the peak."""
        return self.blocks.live_after(self.timeline.peak_index)

    @cached_property
    def by_category(self) -> Mapping[str, int]:
        """Requested bytes at the peak by category."""
        if self.trace is not None:
            return self.timeline.live_at().by_category if len(self.trace) else {}
        return self.dry_run.peak_by_category if self.dry_run is not None else {}

    @property
    def capacity_bytes(self) -> int | None:
        """What PyTorch can have of the device."""
        if self.recording is not None and self.recording.total_bytes:
            return self.recording.total_bytes
        if self.dry_run is not None:
            return self.dry_run.runtime_total_bytes - self.dry_run.context_bytes
        return next((gpu.total_bytes for gpu in self.gpus if gpu.total_bytes), None)

    @cached_property
    def replay(self) -> Replay | None:
        """The recording through PyTorch's allocator, as it was set; ``None`` where it is too long, or has
        no events."""
        recording = self.recording
        if recording is None or not 0 < len(recording.trace) <= MOST_REPLAYED_EVENTS:
            return None
        return run_replay(recording, compare=False, policies=())

    @property
    def settings(self) -> str:
        """The allocator's settings, as they were recorded or else asked for."""
        recorded = self.recording.settings if self.recording is not None else ""
        return recorded or self.configuration.alloc_conf or ""

    @property
    def expandable(self) -> bool | None:
        """Whether expandable segments are on: as recorded, else ``None``."""
        if self.snapshot is not None and "expandable_segments" in self.snapshot.settings:
            return bool(self.snapshot.settings["expandable_segments"])
        return True if "expandable_segments:True" in self.settings.replace(" ", "") else None

    def category_mask(self, *names: str) -> Mask:
        """Which blocks are of these categories."""
        return self.blocks.has("category", names)

    def bytes_at_peak(self, mask: Mask) -> int:
        """Bytes of the masked blocks that are live at the peak."""
        return int(self.blocks.size[mask & self.live_at_peak].sum())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters at the peak."""
        return int(self.by_category.get("parameter", 0))

    @cached_property
    def trainable_bytes(self) -> int:
        """Bytes of the parameters that are trained: as large as their gradients, where those were seen."""
        if self.trace is not None and len(self.trace):
            gradients = self.category_mask("gradient")
            if gradients.any():
                live = np.zeros(len(self.trace) + 1, dtype=np.int64)
                np.add.at(live, self.blocks.born[gradients], self.blocks.size[gradients])
                np.add.at(live, self.blocks.freed[gradients], -self.blocks.size[gradients])
                return int(np.cumsum(live).max())
        return int(self.by_category.get("gradient", 0)) or self.parameter_bytes


_PLACE = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?: |$)")


def source_line(where: str) -> str:
    """The line of code at ``"train.py:12 main"``, stripped; empty where the file is not at hand.

    Only ordinary Python files are looked at, for a recording may name any file.
    """
    match = _PLACE.match(where)
    if match is None or not match["file"].endswith(".py"):
        return ""
    path = Path(match["file"])
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_SOURCE_BYTES:
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    number = int(match["line"])
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""
