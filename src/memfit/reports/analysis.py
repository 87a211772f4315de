"""Analyses as text: each with its sentences and tables; a new analysis needs nothing here."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from memfit.analysis.analyses import Analysed
from memfit.analysis.results import Result, Table

MOST_ROWS = 12


def analysis_text(analysed: Analysed) -> RenderableType:
    """All analyses, one after another, and which were not made, with why."""
    parts: list[RenderableType] = []
    for result in analysed.results.values():
        parts += ["", *_result(result)]
    if analysed.skipped:
        parts += ["", Text("Not analysed", style="bold cyan")]
        parts += [_indented(Text(f"{name}: {why}", style="dim")) for name, why in analysed.skipped.items()]
    return Group(*parts, "")


def _result(result: Result) -> Iterator[RenderableType]:
    yield Text(result.title, style="bold")
    for sentence in result.sentences():
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=1)
        grid.add_column()
        grid.add_row("·", Text(sentence))
        yield _indented(grid)
    for table in result.tables():
        if table.rows:
            yield ""
            yield _indented(Text(table.title, style="bold cyan"))
            yield _indented(_table(table))


def _table(table: Table) -> RenderableType:
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name, number in table.columns:
        shown.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in table.rows[:MOST_ROWS]:
        shown.add_row(*(Text(cell) for cell in row))
    left = len(table.rows) - MOST_ROWS
    if left > 0:
        shown.add_row(Text(f"{left} more", style="dim"), *([""] * (len(table.heads) - 1)))
    return shown


def _indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2))
