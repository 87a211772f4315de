"""`memfit analyze`: where memory and time go, what limits the step, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.options import GPU, Results

if TYPE_CHECKING:
    from memfit.analysis.analyses import Analysed


def analyze(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A trace, memory snapshot, profile folder, torch.profiler trace or step graph, or a "
            "workload (hf:gpt2,batch=8, train.py:workload); several kinds together say more.",
        ),
    ],
    gpu: Annotated[str | None, GPU] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="How much PyTorch may reserve. Default: what it can."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME",
            help="Make this analysis only (repeatable): memory, performance, bottleneck, recommendations.",
        ),
    ] = None,
    allow: Annotated[
        Results,
        typer.Option(metavar="GRADE", help="How far techniques that are tried may move the results."),
    ] = Results.approximate,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
) -> int:
    """Say where memory and time go, what limits the step, and which techniques would help.

    Files need neither torch nor a GPU. Nothing in a file is ever executed.

    Exit code 0 when it is done, 2 when nothing can be made of the sources, 5 when one cannot be read.
    """
    from memfit.analysis.analyses import analyze as run
    from memfit.analysis.subject import Subject
    from memfit.cli.output import check_output

    check_output(report, option="--report", suffixes=(".html", ".htm"))
    subject = Subject.of(*sources, gpu=gpu, budget=budget, allow=allow.value)
    with progress(quiet=as_json) as update:
        result = run(subject, only=tuple(only or ()), progress=update)
    files = _write(result, report)
    if as_json:
        print_json({**result.to_json(), "files": files})
    else:
        _print(result, files)
    return 0


def _write(result: Analysed, report: Path | None) -> dict[str, str]:
    if report is None:
        return {}
    from memfit.core.files import write_atomically
    from memfit.reports.analysis_page import analysis_page

    return {"report": str(write_atomically(report, analysis_page(result)))}


def _print(result: Analysed, files: dict[str, str]) -> None:
    from memfit.reports.analysis import analysis_text

    show(analysis_text(result))
    for name, path in files.items():
        typer.echo(f"{name.capitalize()}: {path}")
