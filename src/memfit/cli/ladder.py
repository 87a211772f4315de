"""`memfit ladder`: techniques one after another on a workload, and what each does."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.options import WORKLOAD, EngineChoice, Results

if TYPE_CHECKING:
    from memfit.analysis.ladder_values import Ladder


class DeviceChoice(StrEnum):
    """Where steps are measured."""

    dryrun = "dryrun"
    cpu = "cpu"
    cuda = "cuda"


def ladder(
    workload: Annotated[str, WORKLOAD],
    techniques: Annotated[
        str | None,
        typer.Option(
            "--techniques",
            metavar="A,B,C",
            help="What to apply, in this order: names, with settings as name:key=value. Default: all that "
            "--allow allows, the most exact first.",
        ),
    ] = None,
    device: Annotated[
        DeviceChoice,
        typer.Option(metavar="DEVICE", help="Where steps are measured: dryrun (a made-up GPU), cpu or cuda."),
    ] = DeviceChoice.dryrun,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="The made-up GPU: a name from `memfit gpus`, or a description like 24GiB,sm89. Default: "
            "a100-80gb.",
        ),
    ] = None,
    allow: Annotated[
        Results,
        typer.Option(metavar="GRADE", help="How far techniques of the default list may move the results."),
    ] = Results.approximate,
    engine: Annotated[
        EngineChoice,
        typer.Option(metavar="ENGINE", help="What measures a dry run: dryrun, portable (anywhere) or auto."),
    ] = EngineChoice.auto,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Real steps on the CPU for the loss.")] = 20,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Seeds that the loss is taken with.")] = 3,
    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Train for real on the CPU, for the loss.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
) -> int:
    """Apply techniques one after another and say what each does to memory, step time and quality.

    A technique that cannot join the chain is listed with its reason, and the chain goes on without it.

    Exit code 0 when it is done, 1 when the workload's plain step fails, 2 for an unknown technique, setting
    or GPU, 5 for an unreadable workload, 6 when the device is not there.
    """
    from memfit.analysis.ladder import ladder as climb
    from memfit.cli.output import check_output

    check_output(report, option="--report", suffixes=(".html", ".htm"))
    with progress(quiet=as_json) as update:
        update("loading torch and the workload")
        climbed = climb(
            workload,
            techniques=techniques,
            device=device.value,
            gpu=gpu,
            allow=allow.value,
            engine=engine.value,
            steps=steps,
            seeds=seeds,
            quality=quality,
            progress=update,
        )
    files = _write(climbed, report)
    if as_json:
        print_json({**climbed.to_json(), "files": files})
    else:
        _print(climbed, files)
    return 0


def _write(climbed: Ladder, report: Path | None) -> dict[str, str]:
    if report is None:
        return {}
    from memfit.core.files import write_atomically
    from memfit.reports.ladder_page import ladder_page

    return {"report": str(write_atomically(report, ladder_page(climbed)))}


def _print(climbed: Ladder, files: dict[str, str]) -> None:
    from memfit.reports.ladder import ladder_text

    show(ladder_text(climbed))
    for name, path in files.items():
        typer.echo(f"{name.capitalize()}: {path}")
