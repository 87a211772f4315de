"""`memfit check`: whether a run keeps a limit of memory, for use in CI."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_FINDINGS, EXIT_RUN_TIME_ERROR

if TYPE_CHECKING:
    from memfit.core.recording import Recording
    from memfit.dryrun.result import DryRunResult

_RUNS = re.compile(r"(hf|tv):|.*\.py(:\w+)?$|(python[\d.]*|torchrun|-m)$")
"""What is run on a made-up GPU, and not read."""
_WORKLOAD = re.compile(r"(hf|tv):|[^\s:]+\.py:\w+$")


class Of(StrEnum):
    """Which peak is checked."""

    requested = "requested"
    allocated = "allocated"
    reserved = "reserved"
    device = "device"


def check(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|SCRIPT ...",
            help="A trace, a memory snapshot or a dry run's JSON; or a script or workload, which is then run "
            "on a made-up GPU (put -- in front of a script with options).",
        ),
    ],
    limit: Annotated[str, typer.Option("--limit", metavar="SIZE", help="What the peak may be: 20GB, 18GiB.")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="GPU", help="The GPU to make up for a script or workload."),
    ] = None,
    of: Annotated[
        Of,
        typer.Option(
            "--of",
            metavar="PEAK",
            help="requested, allocated, reserved (the default), or device (all of it).",
        ),
    ] = Of.reserved,
    steps: Annotated[
        str,
        typer.Option("--steps", metavar="N", help="Of a script: end after so many optimizer steps, or all."),
    ] = "3",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Check that a run keeps a limit of GPU memory.

    Exit code 0 when it does, 3 when the peak is over the limit or memory ran out, 1 when the script fails.
    """
    from memfit.analysis.peaks import LimitCheck, peaks_of
    from memfit.core.units import parse_bytes

    limit_bytes = parse_bytes(limit, what="--limit")
    source = _source(target, gpu, steps)
    result = LimitCheck(name=" ".join(target), of=of.value, limit_bytes=limit_bytes, peaks=peaks_of(source))
    ended = getattr(source, "exit_code", 0) if not result.peaks.out_of_memory else 0
    if as_json:
        print_json({**result.to_json(), "exit_code": ended})
    else:
        from memfit.reports.diagnosis import check_text

        show(check_text(result))
        if ended:
            typer.echo(f"The script itself ended with exit code {ended}: the peak is that up to there.")
    if not result.ok:
        return EXIT_FINDINGS
    return EXIT_RUN_TIME_ERROR if ended else 0


def _source(target: list[str], gpu: str | None, steps: str) -> Recording | DryRunResult:
    """What is to be checked: read, or run."""
    from memfit.analysis.inputs import read_job_file
    from memfit.cli.dryrun import parse_steps
    from memfit.core.errors import UsageError

    if not _RUNS.match(target[0]):
        if len(target) > 1:
            raise UsageError(f"{' '.join(target)}: one file at a time (a script ends in .py)")
        return read_job_file(target[0])
    if gpu is None:
        raise UsageError(f"{target[0]} is run on a made-up GPU: say which with --gpu (see memfit gpus)")
    from memfit.dryrun import dry_run

    if len(target) == 1 and _WORKLOAD.match(target[0]):
        return dry_run(target[0], gpu=gpu)
    return dry_run(target, gpu=gpu, steps=parse_steps(steps), output="stderr")
