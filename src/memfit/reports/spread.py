"""A size that is not known exactly in one line: expected, low and high, and what makes the difference."""

from __future__ import annotations

from memfit.core.units import format_bytes
from memfit.dryrun.uncertainty import Part, Uncertain


def device_memory_line(memory: Uncertain) -> str:
    """``"Device memory 11.9 GiB expected (11.6 to 12.4 GiB: context 0.3 to 0.5 GiB); the allocator's …"``."""
    expected = format_bytes(memory.expected_bytes)
    if not memory.loose_parts:
        return f"Device memory {expected}."
    ends = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
    parts = ", ".join(map(_part, memory.loose_parts))
    exact = ", ".join(part.name for part in memory.parts if part.exact and part.expected_bytes)
    tail = f"; {exact}: exact" if exact else ""
    told = f"; {memory.calibration}" if memory.calibration else ""
    return f"Device memory {expected} expected ({ends}: {parts}{tail}{told})."


def _part(part: Part) -> str:
    """Sizes of one sign as they are, shifts with their signs."""
    if part.low_bytes >= 0:
        return f"{part.name} {format_bytes(part.low_bytes)} to {format_bytes(part.high_bytes)}"
    return f"{part.name} {_signed(part.low_bytes)} to {_signed(part.high_bytes)}"


def _signed(size_bytes: int) -> str:
    sign = "−" if size_bytes < 0 else "+" if size_bytes > 0 else ""
    return f"{sign}{format_bytes(abs(size_bytes))}"
