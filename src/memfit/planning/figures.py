"""The values planning works with: what a step needs, a candidate, a plan's result. No torch, no process, only
values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.core.exactness import Exactness

Settings = Mapping[str, Any]
"""One technique as JSON: ``{"technique": "gradient_checkpointing", "blocks": {…}}``."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What one training step needs: three peaks in bytes (PyTorch's terms) and the predicted time.

    ``host_bytes`` is memory of the host that takes the device's place: pinned for what is offloaded, and
    optimizer states that are stepped there.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    step_seconds: float
    flops: float = 0.0
    forward_end_bytes: int | None = None
    peak_by_category: Mapping[str, int] = field(default_factory=dict)
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)
    trace_path: str | None = None
    host_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON form; ``from_json`` takes it back."""
        return {
            "peak_requested_bytes": self.peak_requested_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "step_seconds": self.step_seconds,
            "flops": self.flops,
            "forward_end_bytes": self.forward_end_bytes,
            "peak_by_category": dict(self.peak_by_category),
            "peak_by_phase": dict(self.peak_by_phase),
            "trace_path": self.trace_path,
            "host_bytes": self.host_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepFigures:
        """Figures from any JSON object that has the three peaks; KeyError, TypeError or ValueError names what
        lacks."""
        return cls(
            peak_requested_bytes=int(data["peak_requested_bytes"]),
            peak_allocated_bytes=int(data["peak_allocated_bytes"]),
            peak_reserved_bytes=int(data["peak_reserved_bytes"]),
            step_seconds=float(data["step_seconds"]),
            flops=float(data.get("flops") or 0.0),
            forward_end_bytes=None
            if data.get("forward_end_bytes") is None
            else int(data["forward_end_bytes"]),
            peak_by_category={str(k): int(v) for k, v in (data.get("peak_by_category") or {}).items()},
            peak_by_phase={str(k): int(v) for k, v in (data.get("peak_by_phase") or {}).items()},
            trace_path=data.get("trace_path"),
            host_bytes=int(data.get("host_bytes") or 0),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way of running the step that was tried by a dry run: a named schedule or a plan of the solver.

    ``measured_by`` says how: ``"session"`` (many plans in one process, memory emptied before each) or
    ``"fresh"`` (three real steps in a process of its own; only these reserved peaks are compared with the
    budget).
    """

    name: str
    techniques: tuple[Settings, ...]
    exactness: Exactness
    figures: StepFigures
    recompute_percent: float
    measured_by: Literal["session", "fresh"] = "session"
    fits: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON form: one row of the time–memory front."""
        return {
            "name": self.name,
            "techniques": [dict(settings) for settings in self.techniques],
            "exactness": self.exactness,
            "recompute_percent": self.recompute_percent,
            "measured_by": self.measured_by,
            "fits": self.fits,
            **self.figures.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Another training that was run where no plan fits: ``what`` it is, in words, how far it leaves the one
    asked for, and what it reserves with every block recomputed."""

    what: str
    exactness: Exactness
    techniques: tuple[Settings, ...]
    peak_reserved_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {**vars(self), "techniques": [dict(settings) for settings in self.techniques]}


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What running plain and planned steps on real values showed.

    ``passed`` is None where nothing could be run (``reason`` says why). ``bitwise`` holds for loss,
    gradients, buffers, random state and the parameters after the optimizer steps together;
    ``max_relative_error`` is the largest seen.
    """

    passed: bool | None
    bitwise: bool = False
    device: str = "cpu"
    scale: str = ""
    steps: int = 0
    max_relative_error: float | None = None
    tolerance: float = 0.0
    differences: tuple[str, ...] = ()
    reason: str | None = None
    wall_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON form; ``from_json`` takes it back."""
        return {
            "passed": self.passed,
            "bitwise": self.bitwise,
            "device": self.device,
            "scale": self.scale,
            "steps": self.steps,
            "max_relative_error": self.max_relative_error,
            "tolerance": self.tolerance,
            "differences": list(self.differences),
            "reason": self.reason,
            "wall_seconds": self.wall_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verified:
        """The value that ``to_json`` wrote."""
        return cls(**{**data, "differences": tuple(data.get("differences", ()))})
