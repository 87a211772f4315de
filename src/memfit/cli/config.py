"""`memfit config`: what is configured, and where each value came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.console import print_json, show

if TYPE_CHECKING:
    from memfit.config import Configuration

SCHEMA_VERSION = 1
_SIZES = ("total_memory", "available_memory", "pool_size", "chunk_size", "memory_budget")


def config(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE|DIR ...]", help="YAML files, or folders of them. Default: none."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting that wins over the files."),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--show/--check", help="Show every setting, or only say whether all is well.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Read a configuration, say what is wrong with it, and show every value with where it came from.

    Files first, then environment variables (MEMFIT_MEMORY__GPU_MEMORY__AVAILABLE_MEMORY=6GB), then --set; the
    later wins.

    Exit code 0 when it can be used, 5 when a file is wrong (each mistake with its line), 2 for a wrong --set
    or variable.
    """
    from memfit.config import load_configuration

    configuration = load_configuration(*(places or ()), flags=set_ or ())
    if as_json:
        print_json(_to_json(configuration))
        return 0
    if show_all:
        show(_screen(configuration))
    for doubt in configuration.warnings:
        typer.echo(f"memfit: warning: {doubt}", err=True)
    if not show_all:
        typer.echo(f"{len(configuration.given)} settings, all valid")
    return 0


def _to_json(configuration: Configuration) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": {
            path: {"value": value, "origin": origin} for path, value, origin in configuration.rows()
        },
        "warnings": list(configuration.warnings),
    }


def _screen(configuration: Configuration) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("from", overflow="fold")
    for path, value, origin in configuration.rows():
        table.add_row(path, _text(path, value), origin)
    return table


def _text(path: str, value: Any) -> str:
    from memfit.core.units import format_bytes

    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return format_bytes(value) if path.rpartition(".")[2] in _SIZES else str(value)
