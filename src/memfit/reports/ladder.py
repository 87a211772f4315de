"""A ladder as text: one row for each rung, and why a figure or a technique is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.analysis.advice import settings_text
from memfit.analysis.ladder_values import Ladder, Quality, Rung
from memfit.core.units import format_bytes, format_seconds
from memfit.reports.verdict import signed_percent

HEADS: tuple[tuple[str, bool], ...] = (
    ("rung", False),
    ("peak", True),
    ("to rung before", True),
    ("to plain", True),
    ("step", True),
    ("loss, to plain", True),
)
"""Columns of the table, and whether each holds numbers."""


@dataclass(frozen=True, kw_only=True)
class LadderRow:
    """What the table shows of one rung of the chain."""

    rung: Rung
    cells: tuple[str, ...]


def ladder_rows(ladder: Ladder) -> tuple[LadderRow, ...]:
    """One row for each rung that is part of the chain."""
    return tuple(LadderRow(rung=rung, cells=_cells(ladder, rung)) for rung in ladder.climbed)


def rung_name(rung: Rung) -> str:
    """The technique in words, with its settings."""
    return rung.name if rung.settings is None else settings_text(rung.settings)


def headline(ladder: Ladder) -> str:
    """What the whole chain came to."""
    first, last = ladder.climbed[0], ladder.climbed[-1]
    if first.peak_bytes is None or last.peak_bytes is None or first is last:
        return "No technique could be applied."
    change = signed_percent(100.0 * (last.peak_bytes / first.peak_bytes - 1.0))
    times = ""
    if first.step_seconds and last.step_seconds and first.step_seconds_kind == last.step_seconds_kind:
        slower = signed_percent(100.0 * (last.step_seconds / first.step_seconds - 1.0))
        times = f"; step time {slower}, {last.step_seconds_kind}"
    return (
        f"{format_bytes(first.peak_bytes)} → {format_bytes(last.peak_bytes)} ({change}) with "
        f"{len(ladder.climbed) - 1} of {len(ladder.rungs) - 1} techniques{times}."
    )


def subtitle(ladder: Ladder) -> str:
    """What was measured where."""
    peak = "reserved" if ladder.rungs[0].peak_reserved_bytes is not None else "the tensors' own"
    how = {
        "dryrun": "a dry run",
        "portable": "the portable engine",
        "cpu": "real steps",
        "cuda": "real steps",
    }
    return f"{ladder.device_name}, by {how[ladder.engine]}; peaks are {peak} bytes of one step"


def reasons(ladder: Ladder) -> tuple[str, ...]:
    """Why techniques are not part of the chain, and why figures are missing; each reason once."""
    found: dict[str, None] = {}
    for rung in ladder.rungs:
        if rung.skipped is not None:
            found[f"{rung_name(rung)} is not part of the chain: {rung.skipped}"] = None
        if rung.step_seconds_reason is not None:
            new = rung.step_seconds_reason.rpartition("; ")[2]
            found[f"No step time from {new.partition(':')[0]} on: {new.partition(': ')[2] or new}"] = None
        if rung.quality_reason is not None:
            found[f"No loss for {rung.name}: {rung.quality_reason}"] = None
    return (*found, *ladder.notes)


def quality_sentence(ladder: Ladder) -> str | None:
    """How the losses were taken, and what chance alone does to them."""
    quality = ladder.rungs[0].quality
    if quality is None:
        return None
    return (
        f"Losses: {quality.steps} real steps on the CPU ({quality.scale}), {len(quality.losses)} "
        f"{'seed' if len(quality.losses) == 1 else 'seeds'}, taken in evaluation mode on batches that were "
        f"not trained on; plain {quality.loss:.4f}, another seed changes it by {quality.seed_spread:.4f} "
        "(standard deviation)."
    )


def ladder_text(ladder: Ladder) -> RenderableType:
    """The ladder for a terminal or a pipe."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name, number in HEADS:
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in ladder_rows(ladder):
        table.add_row(*(Text(cell) for cell in row.cells))
    parts: list[RenderableType] = [
        "",
        Text(f"Ladder of {ladder.workload}", style="bold"),
        Text(subtitle(ladder), style="dim"),
        "",
        Padding(table, (0, 0, 0, 2)),
        "",
        Text(headline(ladder), style="bold"),
        *_sentences(ladder),
        "",
    ]
    return Group(*parts)


def _sentences(ladder: Ladder) -> Iterator[RenderableType]:
    for sentence in (quality_sentence(ladder), *reasons(ladder)):
        if sentence:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row("·", Text(sentence))
            yield grid


def _cells(ladder: Ladder, rung: Rung) -> tuple[str, ...]:
    before, plain = ladder.before(rung), ladder.rungs[0]
    return (
        rung_name(rung),
        "–" if rung.peak_bytes is None else format_bytes(rung.peak_bytes),
        "" if before is None else _change(before, rung),
        "" if before is None else _change(plain, rung),
        _step(rung),
        "" if rung.quality is None else _loss(rung.quality, first=before is None),
    )


def _change(before: Rung, after: Rung) -> str:
    if before.peak_bytes is None or after.peak_bytes is None or not before.peak_bytes:
        return "–"
    return signed_percent(100.0 * (after.peak_bytes / before.peak_bytes - 1.0))


def _step(rung: Rung) -> str:
    if rung.step_seconds is None:
        return "–"
    mark = "≈" if rung.step_seconds_kind == "predicted" else ""
    return f"{mark}{format_seconds(rung.step_seconds)}"


def _loss(quality: Quality, *, first: bool) -> str:
    if first:
        return f"{quality.loss:.4f}"
    if quality.losses == quality.plain_losses:
        return f"{quality.loss:.4f}, equal"
    return f"{quality.loss:.4f}, {quality.difference:+.4f} ± {quality.difference_spread:.4f}"
