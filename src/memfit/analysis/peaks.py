"""The three peaks of a recording or a dry run, and whether they keep a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.allocators.lab import replay
from memfit.analysis.blocks import whole_trace
from memfit.analysis.evidence import MOST_REPLAYED_EVENTS
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import Action
from memfit.dryrun.result import DryRunResult

Figure = Literal["requested", "allocated", "reserved", "device"]
FIGURES: Mapping[Figure, str] = {
    "requested": "what the operations asked for",
    "allocated": "torch.cuda.max_memory_allocated",
    "reserved": "torch.cuda.max_memory_reserved",
    "device": "what nvidia-smi would show",
}
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The highest bytes of a run; ``None`` where they are not known.

    Attributes:
        requested_bytes, allocated_bytes, reserved_bytes: as PyTorch counts them.
        device_bytes: context, libraries and reserved memory together.
        out_of_memory: whether it ran out of memory.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None = None
    out_of_memory: bool = False

    def figure(self, name: Figure) -> int:
        """One of them.

        Raises:
            UsageError: it is not known of this input.
        """
        value = getattr(self, f"{name}_bytes")
        if value is None:
            known = [figure for figure in FIGURES if getattr(self, f"{figure}_bytes") is not None]
            raise UsageError(f"this input does not tell the {name} peak; it tells {', '.join(known)}")
        return int(value)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "requested_bytes": self.requested_bytes,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "out_of_memory": self.out_of_memory,
        }


def peaks_of(source: Recording | DryRunResult) -> Peaks:
    """The peaks of a recording (its segments', or else a replay's) or a dry run."""
    if isinstance(source, DryRunResult):
        return Peaks(
            requested_bytes=source.peak_requested_bytes,
            allocated_bytes=source.peak_allocated_bytes,
            reserved_bytes=source.peak_reserved_bytes,
            device_bytes=source.device_total_bytes,
            out_of_memory=source.oom is not None,
        )
    trace = whole_trace(source)
    timeline = Timeline.of(trace)
    recorded = source.allocated_bytes
    allocated = int(recorded.max(initial=0)) if recorded is not None else timeline.peak_allocated_bytes
    return Peaks(
        requested_bytes=timeline.peak_bytes,
        allocated_bytes=max(allocated, timeline.peak_bytes),
        reserved_bytes=_reserved(source),
        out_of_memory=bool((trace.action == Action.OOM).any()),
    )


def _reserved(recording: Recording) -> int | None:
    recorded = recording.recorded_peak_reserved_bytes
    if recorded is not None:
        return recorded
    if len(recording.trace) > MOST_REPLAYED_EVENTS:
        return None
    return replay(recording, compare=False, policies=()).peak_reserved_bytes


@dataclass(frozen=True, kw_only=True)
class LimitCheck:
    """Whether a run keeps a limit.

    Attributes:
        name: of what was checked.
        of: which figure.
        limit_bytes: what it may be.
        peaks: what they are.
    """

    name: str
    of: Figure
    limit_bytes: int
    peaks: Peaks

    @property
    def peak_bytes(self) -> int:
        """The figure that is checked."""
        return self.peaks.figure(self.of)

    @property
    def ok(self) -> bool:
        """Whether the run got to its end within the limit."""
        return self.peak_bytes <= self.limit_bytes and not self.peaks.out_of_memory

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "of": self.of,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": self.peak_bytes,
            "ok": self.ok,
            "peaks": self.peaks.to_json(),
        }
