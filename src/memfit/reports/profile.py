"""A profile as text: what memory was used for at the peak, and how the peak went from step to step."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes, format_seconds
from memfit.profiling.profile import Profile
from memfit.profiling.usage import TABLES
from memfit.reports.elements import percent
from memfit.reports.replay import spark

ROWS = 8
BAR_COLUMNS = 20


def profile_text(profile: Profile, *, exit_code: int = 0) -> RenderableType:
    """The whole profile, for a terminal or a pipe."""
    usage = profile.usage
    parts: list[RenderableType] = ["", Text(usage.headline(), style="bold")]
    if exit_code:
        parts.insert(0, Text(f"The script failed with exit code {exit_code}.", style="bold red"))
    line = usage.device_line()
    parts += [Text(line, style="dim")] if line else []
    if usage.step is None:
        return Group(*parts, "No step was noted in detail.")
    for label, heading in TABLES.items():
        parts += ["", Text(f"{heading}, at the peak", style="bold cyan")]
        parts.append(_table(usage.step.peak_by[label], usage.peak_bytes))
    parts += ["", Text("Highest in each phase", style="bold cyan"), _table(usage.by_phase, usage.peak_bytes)]
    parts += _over_steps(profile)
    return Group(*parts, "")


def _table(rows: Mapping[str, int], whole: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    listed = list(rows.items())
    rest = sum(size for _, size in listed[ROWS:])
    for name, size in [*listed[:ROWS], *([("others", rest)] if rest else [])]:
        bar = "█" * round(BAR_COLUMNS * size / whole) if whole else ""
        table.add_row(Text(name or "–"), format_bytes(size), percent(size, whole), Text(bar, style="cyan"))
    return Padding(table, (0, 0, 0, 2))


def _over_steps(profile: Profile) -> list[RenderableType]:
    """The peak and the end of each detailed step: where the end rises, something is kept."""
    steps = profile.detailed_steps
    if len(steps) < 2:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading in ("step", "peak", "at its end", "took"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in [*steps[:2], *(steps[2:][-4:])]:
        took = "" if step.seconds is None else format_seconds(step.seconds)
        table.add_row(str(step.number), format_bytes(step.peak_bytes), format_bytes(step.end_bytes), took)
    top = max(step.peak_bytes for step in steps)
    line = Text.assemble("peaks  ", spark([step.peak_bytes for step in steps], top))
    return ["", Text("Detailed steps", style="bold cyan"), Padding(Group(line, table), (0, 0, 0, 2))]
