"""`memfit run`: a user's own script, unchanged, with a configuration in effect."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.children import run_child
from memfit.cli.exit_codes import EXIT_INTERRUPTED, EXIT_RUN_TIME_ERROR


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT ...",
            help="What to run: train.py and its arguments, or python -m module. Put -- in front of it.",
        ),
    ],
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", metavar="DIR|FILE", help="YAML files, or folders of them; may be repeated."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting that wins over the files."),
    ] = None,
) -> int:
    """Run a script, without a change to it, with memory settings and techniques of a configuration in effect.

    Techniques are applied to a model when the script makes an optimizer for its parameters; what is done is
    told on stderr.

    Exit code 0 when the script ended well, 1 when it failed, 2 or 5 for a mistake in the configuration, 130
    when it was interrupted.
    """
    from memfit.config import load_configuration
    from memfit.dryrun.command import parse_command

    script = parse_command(command)
    places = [str(place.absolute()) for place in config or ()]
    configuration = load_configuration(*places, flags=set_ or ())  # mistakes are told before torch is loaded
    for doubt in configuration.warnings:
        typer.echo(f"memfit: warning: {doubt}", err=True)
    words = [
        sys.executable, "-m", "memfit.configuring.script",
        json.dumps({"places": places, "flags": set_ or []}), script.kind, script.target, *script.arguments,
    ]  # fmt: skip
    code = run_child(words, environment={**os.environ, **script.environment})
    return {0: 0, EXIT_INTERRUPTED: EXIT_INTERRUPTED}.get(code, EXIT_RUN_TIME_ERROR)
