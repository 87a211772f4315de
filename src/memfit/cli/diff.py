"""`memfit diff`: why one run needs more memory than another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_FINDINGS


class Of(StrEnum):
    """Which peak is judged."""

    requested = "requested"
    allocated = "allocated"
    reserved = "reserved"


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="The run before: a trace, a memory snapshot, or a dry run's JSON."),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The run after.")],
    fail_over: Annotated[
        str | None,
        typer.Option(
            "--fail-over",
            metavar="LIMIT",
            help="Exit with 3 where B's peak is higher by more than this: 5% or 200MiB.",
        ),
    ] = None,
    of: Annotated[
        Of | None,
        typer.Option(
            "--of", metavar="PEAK", help="What --fail-over judges: requested, allocated or reserved."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say why B needs more memory than A: by category, phase, module, operation and line.

    Each run is looked at when most is live in it. Needs neither torch nor a GPU.

    Exit code 0; 3 when B is over --fail-over, 5 when a file cannot be read.
    """
    from memfit.analysis.difference import allowed_bytes, compare
    from memfit.analysis.inputs import read_job_file

    if fail_over is not None:
        allowed_bytes(fail_over, 0)  # a limit that cannot be meant is told before the files are read
    difference = compare(read_job_file(a), read_job_file(b), names=(str(a), str(b)))
    figure = difference.figure(None if of is None else of.value)
    over = fail_over is not None and difference.exceeds(fail_over, figure)
    if as_json:
        print_json({**difference.to_json(), "judged": figure, "fail_over": fail_over, "over": over})
    else:
        from memfit.reports.diagnosis import difference_text

        show(difference_text(difference))
        if over:
            typer.echo(f"Over the limit of {fail_over} for the {figure} peak.")
    return EXIT_FINDINGS if over else 0
