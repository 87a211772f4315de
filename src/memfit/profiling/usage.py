"""What a profiler says of memory, as a value that prints well on a terminal and in a notebook. No torch."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.core.units import format_bytes
from memfit.profiling.devices import DeviceReading
from memfit.profiling.records import StepEvents, sums

TABLES: Mapping[str, str] = {
    "category": "By category",
    "module": "By module",
    "op": "By operator",
    "site": "By line",
    "phase": "By phase in which it was allocated",
}
"""The labels by which bytes are added up, and the headings of their tables."""
ROWS = 6
BAR_COLUMNS = 24
KEPT_ROWS = 60


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """One step of the profiled program.

    Attributes:
        number: of the step, from 0.
        seconds: from its mark to the next one; None for the last one while it runs.
        detailed: whether every allocation of it was noted; if not, the fields below are empty.
        peak_bytes: the most bytes of tensors that were live at once.
        end_bytes: live when it ended.
        peak_by: label of `TABLES` → text → bytes live at the peak, the largest first.
        peak_by_phase: the most bytes that were live in each phase.
        end_by_site: bytes live at the end by the line that allocated them, the largest first.
        device: the device's own counters when it ended.
    """

    number: int
    seconds: float | None = None
    detailed: bool = False
    peak_bytes: int = 0
    end_bytes: int = 0
    peak_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)
    end_by_site: Mapping[str, int] = field(default_factory=dict)
    device: DeviceReading | None = None

    @classmethod
    def of(cls, step: StepEvents, *, seconds: float | None, device: DeviceReading | None) -> StepMemory:
        """The figures of a step that was noted in detail."""
        at_peak, at_end = step.live_at(step.peak_event), step.live_at(len(step.events))
        return cls(
            number=step.number,
            seconds=seconds,
            detailed=True,
            peak_bytes=step.peak_bytes,
            end_bytes=sum(block.size_bytes for block in at_end),
            peak_by={label: _largest(sums(at_peak, label)) for label in TABLES},
            peak_by_phase=step.phase_peaks(),
            end_by_site=_largest(sums(at_end, "site")),
            device=device,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values; `from_json` takes them back."""
        return {
            "number": self.number,
            "seconds": self.seconds,
            "detailed": self.detailed,
            "peak_bytes": self.peak_bytes,
            "end_bytes": self.end_bytes,
            "peak_by": {label: dict(rows) for label, rows in self.peak_by.items()},
            "peak_by_phase": dict(self.peak_by_phase),
            "end_by_site": dict(self.end_by_site),
            "device": None if self.device is None else self.device.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepMemory:
        """The value that `to_json` wrote; KeyError or TypeError where it is none."""
        device = data.get("device")
        return cls(**{**data, "device": None if device is None else DeviceReading(**device)})


def _largest(rows: dict[str, int]) -> dict[str, int]:
    """The largest rows; the others together under ``"…"``, so that they still add up."""
    kept = dict(list(rows.items())[:KEPT_ROWS])
    rest = sum(rows.values()) - sum(kept.values())
    return {**kept, "…": rest} if rest else kept


@dataclass(frozen=True, kw_only=True)
class MemoryUsage:
    """What is used now and was used at the peak. ``print(usage)`` shows it; a notebook shows tables.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        step: the detailed step with the highest peak; None where none has ended yet.
        steps_done, steps_detailed: how many steps there were, and how many were noted in detail.
        current_bytes: tensors that are known and alive now.
        device: the device's own counters now.
        frequency: every how many steps one is noted in detail.
    """

    device_type: str
    step: StepMemory | None
    steps_done: int
    steps_detailed: int
    current_bytes: int
    device: DeviceReading | None
    frequency: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that were live at once, among the steps noted in detail."""
        return 0 if self.step is None else self.step.peak_bytes

    @property
    def by_category(self) -> Mapping[str, int]:
        """Bytes at the peak by category."""
        return self._table("category")

    @property
    def by_module(self) -> Mapping[str, int]:
        """Bytes at the peak by the module that allocated them."""
        return self._table("module")

    @property
    def by_operator(self) -> Mapping[str, int]:
        """Bytes at the peak by the operator that allocated them."""
        return self._table("op")

    @property
    def by_line(self) -> Mapping[str, int]:
        """Bytes at the peak by the line of code that allocated them."""
        return self._table("site")

    @property
    def by_phase(self) -> Mapping[str, int]:
        """The most bytes that were live in each phase of the step."""
        return {} if self.step is None else self.step.peak_by_phase

    def _table(self, label: str) -> Mapping[str, int]:
        return {} if self.step is None else self.step.peak_by[label]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "device_type": self.device_type,
            "current_bytes": self.current_bytes,
            "peak_bytes": self.peak_bytes,
            "steps_done": self.steps_done,
            "steps_detailed": self.steps_detailed,
            "profiling_frequency": self.frequency,
            "device": None if self.device is None else self.device.to_json(),
            "step": None if self.step is None else self.step.to_json(),
        }

    def headline(self) -> str:
        """The figures in one sentence."""
        name = {"cpu": "CPU", "cuda": "CUDA"}.get(self.device_type, self.device_type)
        text = f"{name} memory of tensors: {format_bytes(self.current_bytes)} now"
        if self.step is not None:
            text += f", {format_bytes(self.peak_bytes)} at the peak (step {self.step.number})"
        return f"{text}; {self.steps_done} steps, {self.steps_detailed} of them in detail"

    def device_line(self) -> str | None:
        """The device's own counters in one sentence."""
        reading = self.device
        if reading is None:
            return None
        if self.device_type != "cuda":
            peak = format_bytes(reading.peak_allocated_bytes)
            return f"The process: {format_bytes(reading.allocated_bytes)} resident, {peak} at most"
        parts = (
            f"{format_bytes(reading.allocated_bytes)} allocated (at most "
            f"{format_bytes(reading.peak_allocated_bytes)})",
            f"{format_bytes(reading.reserved_bytes)} reserved (at most "
            f"{format_bytes(reading.peak_reserved_bytes)})",
            f"{reading.alloc_retries} retries",
        )
        return f"PyTorch's allocator: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.headline(), *([self.device_line()] if self.device is not None else [])]
        if self.step is None:
            return "\n".join([*(line for line in lines if line), "No step has been noted in detail yet."])
        for label, heading in TABLES.items():
            lines += ["", f"{heading}, at the peak", *_rows(self.step.peak_by[label], self.peak_bytes)]
        lines += ["", "Highest in each phase", *_rows(self.by_phase, self.peak_bytes)]
        return "\n".join(line for line in lines if line is not None)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows on a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        parts = [f"<p><strong>{html.escape(self.headline())}</strong></p>"]
        line = self.device_line()
        parts += [f"<p>{html.escape(line)}</p>"] if line else []
        tables = {} if self.step is None else {TABLES[label]: self.step.peak_by[label] for label in TABLES}
        if self.step is not None:
            tables["Highest in each phase"] = self.by_phase
        cells = (_html_table(heading, rows, self.peak_bytes) for heading, rows in tables.items())
        return "".join([*parts, "<div style='display:flex;flex-wrap:wrap;gap:1.5em'>", *cells, "</div>"])


def _shown(rows: Mapping[str, int]) -> list[tuple[str, int]]:
    """The first rows, and the sum of the others."""
    listed = list(rows.items())
    rest = sum(size for _, size in listed[ROWS:])
    return [*((name or "–", size) for name, size in listed[:ROWS]), *([("others", rest)] if rest else [])]


def _rows(rows: Mapping[str, int], whole: int) -> Sequence[str]:
    shown = _shown(rows)
    width = max((len(name) for name, _ in shown), default=0)
    return [
        f"  {name:<{width}}  {format_bytes(size):>11}  {_share(size, whole):>6}  {_bar(size, whole)}".rstrip()
        for name, size in shown
    ]


def _share(size: int, whole: int) -> str:
    return f"{100 * size / whole:.1f} %" if whole else ""


def _bar(size: int, whole: int) -> str:
    return "█" * round(BAR_COLUMNS * size / whole) if whole else ""


def _html_table(heading: str, rows: Mapping[str, int], whole: int) -> str:
    body = "".join(
        f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{format_bytes(size)}</td>"
        f"<td>{_share(size, whole)}</td></tr>"
        for name, size in _shown(rows)
    )
    return f"<table><caption>{html.escape(heading)}</caption>{body}</table>"
