"""`memfit diagnose` and `memfit rules`: what is wrong with a job's memory, and what changes would save."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_FINDINGS


class FailOn(StrEnum):
    """The least severity of a finding that makes the command fail."""

    error = "error"
    warning = "warning"
    info = "info"
    never = "never"


_LEVELS = (FailOn.info, FailOn.warning, FailOn.error)
"""In the order of the severities."""


def diagnose(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Traces, memory snapshots, a dry run's JSON, memory_stats as JSON, configurations (Trainer, "
            "DeepSpeed, Accelerate, config.json, memfit's), nvidia-smi's output, logs: all of one job. "
            "Several traces are its ranks.",
        ),
    ],
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", metavar="SEVERITY", help="Exit with 3 at such a finding.")
    ] = FailOn.error,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="RULE.NAME=N",
            help="Another threshold, like LEAK_MONOTONIC.least_steps=4 (repeatable).",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write everything as one HTML page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say what is wrong with a job's memory, on what evidence, and what each change would save.

    Needs neither torch nor a GPU; nothing in a file is ever executed. `memfit rules` lists what it looks for.

    Exit code 0 without findings at the asked severity, 3 with some, 5 when a file cannot be read.
    """
    from memfit.analysis.diagnosis import diagnose as run
    from memfit.analysis.findings import SEVERITIES
    from memfit.analysis.rules import with_thresholds
    from memfit.cli.output import check_output

    check_output(report, option="--report", suffixes=(".html", ".htm"))
    rules = with_thresholds(settings or ())
    with progress(quiet=as_json) as update:
        diagnosis = run(*files, rules=rules, progress=update)
    written = {}
    if report is not None:
        from memfit.core.files import write_atomically
        from memfit.reports.diagnosis_page import diagnosis_page

        written["report"] = str(write_atomically(report, diagnosis_page(diagnosis)))
    if as_json:
        print_json({**diagnosis.to_json(), "written": written})
    else:
        from memfit.reports.diagnosis import diagnosis_text

        show(diagnosis_text(diagnosis))
        for name, path in written.items():
            typer.echo(f"{name.capitalize()}: {path}")
    failed = fail_on is not FailOn.never and diagnosis.at_least(SEVERITIES[_LEVELS.index(fail_on)])
    return EXIT_FINDINGS if failed else 0


def rules(
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="ID", help="One rule in full, by id or number.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List the rules of `memfit diagnose`: what each finds, how, and what its advice saves.

    Exit code 0; 2 where there is no such rule.
    """
    from memfit.analysis.rules import RULES, rule_named
    from memfit.reports.diagnosis import rule_text, rules_text

    chosen = RULES if explain is None else (rule_named(explain),)
    if as_json:
        print_json({"schema_version": 1, "rules": [rule.to_json() for rule in chosen]})
    else:
        show(rules_text(chosen) if explain is None else rule_text(chosen[0]))
    return 0
