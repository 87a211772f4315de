"""`memfit doctor`: what this machine can do, and the command that gets each thing that is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_CANNOT_RUN


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trial: Annotated[
        bool, typer.Option(help="Also put a first tensor on the made-up GPU (a few seconds).")
    ] = True,
) -> int:
    """Say what this machine can do, and how to get the rest.

    Exit code 0 when memfit can work here (by the dry run, or else by the portable engine), 6 when it cannot.
    """
    from memfit.cli.machine import look_at_machine

    with progress(quiet=as_json) as update:
        update("looking at this machine")
        machine = look_at_machine(trial=trial)
    if as_json:
        print_json(machine.to_json())
    else:
        from memfit.cli.screens import machine_screen

        show(machine_screen(machine))
    return 0 if machine.engine else EXIT_CANNOT_RUN
