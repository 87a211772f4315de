"""Screens of commands that have no report of their own."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.cli.machine import Check, Machine

MARKS = {"ok": ("✓", "green"), "missing": ("✗", "red"), "note": ("·", "dim")}


def machine_screen(machine: Machine) -> RenderableType:
    """The checks, one a row with its remedy below, and the engine that follows from them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in machine.checks:
        mark, style = MARKS[check.state]
        table.add_row(Text(mark, style=f"bold {style}"), check.name, _detail(check))
    engine = {"dryrun": "dry run", "portable": "portable", None: "none"}[machine.engine]
    style = {"dryrun": "bold green", "portable": "bold yellow", None: "bold red"}[machine.engine]
    return Group(
        table,
        "",
        Text.assemble("Engine: ", (engine, style), f". {machine.reason[:1].upper()}{machine.reason[1:]}."),
    )


def _detail(check: Check) -> Text:
    text = Text(check.detail)
    return text if check.remedy is None else text.append(f"\n{check.remedy}", style="cyan")
