"""Why one run needs more memory than another: by category, phase, module, operation and line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.analysis.blocks import whole_trace
from memfit.analysis.peaks import Figure, Peaks, peaks_of
from memfit.analysis.steps import phase_at_events
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.units import format_bytes, parse_bytes
from memfit.dryrun.result import DryRunResult

SCHEMA_VERSION = 1
ASPECTS = ("category", "phase", "module", "op", "where")
"""By what peaks are compared, from coarse to fine."""
_NUMBERS = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_PLACE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?: (?P<function>.*))?$")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        name: of the file.
        peaks: its highest bytes.
        peak_phase: the phase in which its live bytes are highest; empty where unknown.
        at_peak: for each aspect the bytes live at its own peak, by text.
    """

    name: str
    peaks: Peaks
    peak_phase: str = ""
    at_peak: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @staticmethod
    def of(source: Recording | DryRunResult, *, name: str) -> Side:
        """A recording or a dry run as one side."""
        if isinstance(source, DryRunResult):
            at_peak = {"category": source.peak_by_category, "phase": source.peak_by_phase}
            return Side(name=name, peaks=peaks_of(source), at_peak=at_peak)
        trace = whole_trace(source)
        timeline = Timeline.of(trace)
        live = timeline.live_at()
        phase = str(trace.strings[phase_at_events(trace)[timeline.peak_index]]) if len(trace) else ""
        at_peak = {aspect: _grouped(aspect, live.by(aspect)) for aspect in ASPECTS}
        return Side(name=name, peaks=peaks_of(source), peak_phase=phase, at_peak=at_peak)


def _grouped(aspect: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Layers of one kind together (``h.*.mlp``); places without their folder."""
    grouped: dict[str, int] = {}
    for text, size in sizes.items():
        key = _NUMBERS.sub("*", text) if aspect == "module" else text
        if aspect == "where" and (match := _PLACE.match(text)):
            key = f"{os.path.basename(match['file'])}:{match['line']} {match['function'] or ''}".strip()
        grouped[key] = grouped.get(key, 0) + size
    return grouped


@dataclass(frozen=True, kw_only=True)
class Change:
    """One text's bytes on both sides."""

    text: str
    before_bytes: int
    after_bytes: int

    @property
    def delta_bytes(self) -> int:
        """By how much it is more."""
        return self.after_bytes - self.before_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "text": self.text,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "delta_bytes": self.delta_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two runs side by side.

    Attributes:
        a, b: the first and the second.
        changes: for each aspect that both sides know, what differs, the largest change first.
    """

    a: Side
    b: Side
    changes: Mapping[str, tuple[Change, ...]]

    def delta_bytes(self, of: Figure) -> int:
        """By how much the second's peak is higher."""
        return self.b.peaks.figure(of) - self.a.peaks.figure(of)

    def figure(self, asked: Figure | None = None) -> Figure:
        """The figure that is judged: the one asked for, or else reserved where both know it."""
        if asked is not None:
            return asked
        known = self.a.peaks.reserved_bytes is not None and self.b.peaks.reserved_bytes is not None
        return "reserved" if known else "requested"

    def exceeds(self, limit: str, of: Figure) -> bool:
        """Whether the second is higher by more than a share (``"5%"``) or a size (``"200MiB"``).

        Raises:
            UsageError: the limit is neither.
        """
        return self.delta_bytes(of) > allowed_bytes(limit, self.a.peaks.figure(of))

    def sentences(self) -> list[str]:
        """What changed, in order of weight."""
        of = self.figure()
        delta, before = self.delta_bytes(of), self.a.peaks.figure(of)
        share = f" ({100 * delta / before:+.1f} %)" if before else ""
        if not delta:
            text = [f"Both reserve the same: {format_bytes(before)}."]
        else:
            text = [
                f"B's {of} peak is {format_bytes(abs(delta))} {'higher' if delta > 0 else 'lower'}{share}."
            ]
        if self.a.peak_phase and self.a.peak_phase != self.b.peak_phase:
            text.append(f"The peak moved from {self.a.peak_phase} to {self.b.peak_phase}.")
        for aspect in ("category", "where", "module"):
            largest = next(iter(self.changes.get(aspect, ())), None)
            if largest is not None and largest.delta_bytes and largest.text:
                word = "more" if largest.delta_bytes > 0 else "less"
                size = format_bytes(abs(largest.delta_bytes))
                text.append(f"Most by {_ASPECT_WORDS[aspect]}: {largest.text}, {size} {word} at the peak.")
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes are whole numbers."""
        figures: tuple[Figure, ...] = ("requested", "allocated", "reserved")
        known = [
            figure
            for figure in figures
            if None
            not in (getattr(self.a.peaks, f"{figure}_bytes"), getattr(self.b.peaks, f"{figure}_bytes"))
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "a": {"name": self.a.name, "peak_phase": self.a.peak_phase, "peaks": self.a.peaks.to_json()},
            "b": {"name": self.b.name, "peak_phase": self.b.peak_phase, "peaks": self.b.peaks.to_json()},
            "delta": {f"{figure}_bytes": self.delta_bytes(figure) for figure in known},
            "changes": {
                aspect: [change.to_json() for change in changes] for aspect, changes in self.changes.items()
            },
            "sentences": self.sentences(),
        }


_ASPECT_WORDS = {"category": "category", "where": "line", "module": "module"}


def compare(
    a: Recording | DryRunResult, b: Recording | DryRunResult, *, names: tuple[str, str] = ("A", "B")
) -> Difference:
    """Why the second run needs more (or less) memory than the first.

    Args:
        a: what ``memfit.read_trace`` gives, or a dry-run result.
        b: the same, of the other run.
        names: what to call them.

    Examples:
        >>> from memfit.core.trace import TraceBuilder
        >>> def run(size_bytes):
        ...     builder = TraceBuilder()
        ...     builder.alloc(size_bytes, category="activation", where="model.py:7 forward")
        ...     return Recording(trace=builder.build())
        >>> difference = compare(run(8 << 20), run(20 << 20))
        >>> difference.delta_bytes("requested") >> 20, difference.changes["where"][0].text
        (12, 'model.py:7 forward')
    """
    first, second = Side.of(a, name=names[0]), Side.of(b, name=names[1])
    both = [aspect for aspect in ASPECTS if aspect in first.at_peak and aspect in second.at_peak]
    changes = {aspect: _changes(aspect, first.at_peak[aspect], second.at_peak[aspect]) for aspect in both}
    return Difference(a=first, b=second, changes=changes)


def _changes(aspect: str, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    if aspect == "where":
        before, after = _same_functions(before, after)
    rows = [
        Change(text=text, before_bytes=before.get(text, 0), after_bytes=after.get(text, 0))
        for text in {**before, **after}
    ]
    changed = [row for row in rows if row.delta_bytes]
    return tuple(sorted(changed, key=lambda row: (-abs(row.delta_bytes), row.text)))


def _same_functions(
    before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Lines that only one side has are taken together by function: code above them may have moved them."""
    shared = set(before) & set(after)
    sides: list[Mapping[str, int]] = []
    for side in (before, after):
        joined: dict[str, int] = {}
        for text, size in side.items():
            match = None if text in shared else _PLACE.match(text)
            key = text if match is None else f"{match['file']} {match['function'] or ''}".strip()
            joined[key] = joined.get(key, 0) + size
        sides.append(joined)
    return sides[0], sides[1]


def allowed_bytes(limit: str, base_bytes: int) -> int:
    """By how much a peak may grow: a share of ``base_bytes``, or a size.

    Raises:
        UsageError: the text is neither.

    Examples:
        >>> allowed_bytes("5%", 2000), allowed_bytes("1MiB", 2000)
        (100, 1048576)
    """
    text = limit.strip()
    if not text.endswith("%"):
        return parse_bytes(text, what="--fail-over")
    try:
        share = float(text[:-1])
    except ValueError as error:
        raise UsageError(f"--fail-over {limit}: write a share like 5% or a size like 200MiB") from error
    if share < 0:
        raise UsageError(f"--fail-over {limit}: a share cannot be negative")
    return int(base_bytes * share / 100)
