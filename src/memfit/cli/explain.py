"""`memfit explain`: why a program ran out of memory, from its error, its log, and what lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Annotated

import typer

from memfit.cli.console import print_json, show


def explain(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE...|-]",
            help="A log or an error, nvidia-smi's output (text, CSV, XML), a memory snapshot, a trace, a "
            "dry run's JSON, JSON with hints about the job; several are judged together. - is stdin, which "
            "is "
            "also read when nothing is named.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Explain an out-of-memory error: what happened, on what evidence, and what to type.

    Needs neither torch nor a GPU. Nothing in a file is ever executed.

    Exit code 0 when the input was read, also where nothing is known; 5 when a file cannot be read.
    """
    from memfit.analysis.explanations import explain as run

    explanation = run(*_sources(files or []))
    if as_json:
        print_json(explanation.to_json())
    else:
        from memfit.reports.findings import findings_text

        show(findings_text(explanation.findings))
    return 0


def _sources(files: list[str]) -> list[Path | IO[bytes]]:
    from memfit.core.errors import InputError, UsageError

    if not files and sys.stdin.isatty():
        raise UsageError("nothing to explain: name a file, or pipe a text (memfit explain error.txt)")
    if files.count("-") > 1:
        raise UsageError("stdin can be read only once: name - once")
    sources: list[Path | IO[bytes]] = []
    for name in files or ["-"]:
        if name == "-":
            sources.append(sys.stdin.buffer)
        elif not Path(name).exists():
            raise InputError(f"cannot read {name}: no such file (a text is piped: echo '…' | memfit explain)")
        else:
            sources.append(Path(name))
    return sources
