"""Memory over one training step, as few enough points to draw that the peak is still among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.timeline import Timeline
from memfit.core.trace import Trace
from memfit.reports.palette import CATEGORY_PAINTS

Points = npt.NDArray[np.int64]

STEP_PHASES = ("forward", "backward", "recompute", "optimizer")
PHASE_LABELS: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "init": "set-up",
    "other": "",
}
DEFAULT_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A stretch of one phase: events ``first`` to ``last``, both counted from the start of the step."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeries:
    """Live bytes by category over the allocation events of the last step of a trace.

    Attributes:
        events: for each point the number of the event, counted from the step's start.
        by_category: for each category that ever holds anything, its live requested bytes after that event.
        reserved: what the allocator held then; ``None`` where the trace has no segments.
        phases: the phases in order.
        event_count: how many events the step has.
        peak_point: the point at which the sum is highest.
    """

    events: Points
    by_category: Mapping[str, Points]
    reserved: Points | None
    phases: tuple[PhaseSpan, ...]
    event_count: int
    peak_point: int

    @property
    def total(self) -> Points:
        """Live requested bytes at each point."""
        total: Points = np.sum(list(self.by_category.values()), axis=0, dtype=np.int64)
        return total

    @property
    def peak_bytes(self) -> int:
        """The most requested bytes alive at once in this step."""
        return int(self.total[self.peak_point])

    def phase_labels(self) -> tuple[tuple[str, int, int], ...]:
        """Names to write over stretches of events: each phase, or all micro-batches together."""
        names = [span.phase for span in self.phases]
        passes = names.count("backward")
        if passes < 2:
            return tuple((PHASE_LABELS.get(s.phase, s.phase), s.first, s.last) for s in self.phases)
        end = len(names) - names[::-1].index("backward")
        whole = (f"{passes} × forward and backward", self.phases[0].first, self.phases[end - 1].last)
        return (whole, *((PHASE_LABELS.get(s.phase, s.phase), s.first, s.last) for s in self.phases[end:]))

    @classmethod
    def of(cls, trace: Trace, *, points: int = DEFAULT_POINTS) -> StepSeries | None:
        """The last step of `trace` in about `points` points; ``None`` for a trace without events."""
        if len(trace) == 0:
            return None
        first, last = _last_step(trace)
        step = slice(first, last + 1)
        timeline = Timeline.of(trace)
        # With as many points as events nothing is left out: only the step is thinned, not the whole trace.
        live = timeline.by_category(points=len(trace)).bytes_by_category
        chosen = _representatives(timeline.live_bytes[step], points)
        kept = {
            name: live[name][step][chosen]
            for name in CATEGORY_PAINTS
            if name in live and live[name][step].any()
        }
        reserved = timeline.reserved_bytes
        return cls(
            events=chosen,
            by_category=kept or {"other": np.zeros(len(chosen), dtype=np.int64)},
            reserved=reserved[step][chosen] if reserved.any() else None,
            phases=_phase_spans(trace, first, last),
            event_count=last - first + 1,
            peak_point=int(np.argmax(timeline.live_bytes[step][chosen])),
        )


def _last_step(trace: Trace) -> tuple[int, int]:
    """First and last event of the last step: one begins where forward follows the optimizer."""
    phases = np.array(trace.strings)[trace.phase]
    events = np.flatnonzero(np.isin(phases, STEP_PHASES))
    if len(events) == 0:
        return 0, len(trace) - 1
    steps = phases[events]
    begins = (steps == "forward") & np.concatenate([[True], steps[:-1] == "optimizer"])
    starts = events[begins]
    return (int(starts[-1]) if len(starts) else int(events[0])), int(events[-1])


def _representatives(total: Points, points: int) -> Points:
    """Indices of the points to draw: of each stretch the lowest and the highest, and both ends."""
    if len(total) <= points:
        return np.arange(len(total), dtype=np.int64)
    edges = np.linspace(0, len(total), max(points // 2, 1) + 1).astype(np.int64)
    chosen = {0, len(total) - 1}
    for begin, end in pairwise(edges):
        stretch = total[begin:end]
        chosen |= {int(begin + np.argmax(stretch)), int(begin + np.argmin(stretch))}
    return np.array(sorted(chosen), dtype=np.int64)


def _phase_spans(trace: Trace, first: int, last: int) -> tuple[PhaseSpan, ...]:
    """Stretches of one phase. Recomputation happens within backward, so it counts as backward here."""
    spans: list[PhaseSpan] = []
    names = ["backward" if text == "recompute" else text for text in trace.strings]
    previous: str | None = None
    phases: Any = trace.phase[first : last + 1]
    changes = np.flatnonzero(np.concatenate([[True], phases[1:] != phases[:-1]]))
    for begin, end in zip(changes, [*changes[1:], len(phases)], strict=True):
        name = names[phases[begin]]
        if name in ("other", "init") and previous is not None:
            name = previous
        if name == previous:
            spans[-1] = PhaseSpan(phase=name, first=spans[-1].first, last=int(end) - 1)
        else:
            spans.append(PhaseSpan(phase=name, first=int(begin), last=int(end) - 1))
        previous = name
    return tuple(spans)
