"""`memfit fit`: from a workload and a budget to a plan that is checked, saved and shown."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT
from memfit.cli.options import WORKLOAD, Allow, EngineChoice

if TYPE_CHECKING:
    from memfit.planning.plan import FitResult
    from memfit.reports.report import FitReport


class Dimension(StrEnum):
    """What of a workload can be made as large as fits."""

    batch = "batch"
    seq = "seq"


def fit(
    workload: Annotated[str | None, WORKLOAD] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="A name from `memfit gpus`, or a description: 24GiB,sm89; any: the cheapest one that fits "
            "(least memory, then least FLOP/s).",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="How much PyTorch may reserve, like 8GiB. Default: what the GPU has to give.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A YAML file, or a folder of them: planning.workload, planning.gpu and "
            "planning.memory_budget count where the command line does not say.",
        ),
    ] = None,
    allow: Annotated[
        Allow,
        typer.Option(
            metavar="GRADE",
            help="How far results may differ from plain training: exact (bitwise), reordered, approximate.",
        ),
    ] = Allow.exact,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Save the plan, for Plan.load in a script."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FOLDER", help="Write the report's figures as PNG into a folder."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Run plain and planned steps on real values and compare."),
    ] = True,
    engine: Annotated[
        EngineChoice,
        typer.Option(
            metavar="ENGINE",
            help="What measures a step: dryrun (a made-up GPU under PyTorch), portable (anywhere), auto.",
        ),
    ] = EngineChoice.auto,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Draw the whole front instead: the best plan for budgets from the least to plain."
        ),
    ] = False,
    maximize: Annotated[
        Dimension | None,
        typer.Option(
            metavar="WHAT", help="Find the largest batch, or the longest seq(uence), that fits: batch, seq."
        ),
    ] = None,
    inference: Annotated[
        bool,
        typer.Option(
            "--inference",
            help="Fit generation instead of training: weights, prefill, growth of the KV cache.",
        ),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Try torch.compile as well: its graph cut so that chosen operators run again, by PyTorch's "
            "own budgets and for the peak. Fused code needs --allow reordered.",
        ),
    ] = False,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Host memory that plans which offload may use, like 16GiB; 0: none is offloaded. Default: "
            "as much as they need.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", min=1, help="How many tokens --inference generates.")
    ] = 128,
    points: Annotated[
        int, typer.Option("--points", metavar="N", min=2, max=100, help="How many budgets a sweep has.")
    ] = 10,
) -> int:
    """Find the fastest way to train a workload within a memory budget, and prove it.

    Exit code 0 when a plan fits, 4 when none does, 1 when real steps refute the plan, 5 when --config is
    wrong.
    """
    from memfit.cli.fit_config import target

    chosen = target(workload, gpu, budget, places=config or (), takes_budget=not sweep)
    asked = Asked(
        workload=chosen.workload, gpu=chosen.gpu, budget=chosen.budget,
        allow=allow, verify=verify, engine=engine,
        report=report, plan_file=plan_file, png=png, compiled=compiled, host_memory=host_memory,
    )  # fmt: skip
    asked.check_outputs()
    if sweep or maximize or inference or asked.gpu == "any":
        from memfit.cli.fit_questions import run_question

        return run_question(
            asked, sweep=sweep, maximize=maximize, inference=inference, new_tokens=new_tokens, points=points,
            as_json=as_json,
        )  # fmt: skip
    # The traces are read for the charts and then no longer needed.
    with tempfile.TemporaryDirectory(prefix="memfit-") as traces:
        result = _search(asked, Path(traces), quiet=as_json)
        return finish(asked, result, as_json=as_json)


def finish(asked: Asked, result: FitResult, *, as_json: bool, answer: Mapping[str, Any] | None = None) -> int:
    """Writes and shows a result; the exit code. ``answer`` is put before it in the JSON object."""
    from memfit.core.errors import ToolFailure
    from memfit.reports.verdict import verification

    shown = _report(asked, result)
    written = _write(asked, shown)
    if as_json:
        files = {name: str(path) for name, path in written.items()}
        print_json({**_without_traces(result.to_json()), **(answer or {}), "files": files})
    else:
        _print(asked, shown, written)
    if shown.is_refuted:
        raise ToolFailure(f"the plan is refuted, do not use it. {verification(result).text}")
    return 0 if result.fits else EXIT_DOES_NOT_FIT


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asked for."""

    workload: str
    gpu: str
    budget: str | None
    allow: Allow
    verify: bool
    engine: EngineChoice
    report: Path | None
    plan_file: Path | None
    png: Path | None
    compiled: bool = False
    host_memory: str | None = None

    def check_outputs(self) -> None:
        """Every file can be written, which is checked before the long work. Raises UsageError."""
        from memfit.cli.output import check_folder, check_output

        check_output(self.report, option="--report", suffixes=(".html", ".htm"))
        check_output(self.plan_file, option="--plan", suffixes=(".json",))
        if self.png is not None:
            check_folder(self.png, option=f"--png {self.png}")

    def command(self, *more: str) -> str:
        """The command line that does the same again."""
        from memfit.reports.verdict import shell_line

        words = ["memfit", "fit", self.workload, "--gpu", self.gpu]
        options = {
            "--budget": self.budget,
            "--allow": None if self.allow == Allow.exact else self.allow.value,
            "--engine": None if self.engine == EngineChoice.auto else self.engine.value,
            "--host-memory": self.host_memory,
            "--report": self.report,
            "--plan": self.plan_file,
        }
        more = ("--compile", *more) if self.compiled else more
        words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return shell_line([*words, *more, *([] if self.verify else ["--no-verify"])])


STAGES: Mapping[str, str] = {
    "plain step": "running the plain step",
    "options": "measuring what blocks can keep",
    "plans": "trying plans",
    "more levers": "trying what else can make room",
    "compiled plans": "compiling the model, its graph cut for the budget",
    "finalists": "running the best plans in processes of their own",
    "lower bound": "proving how little must be computed again",
    "advice": "running other trainings, as nothing that keeps this one fits",
    "verify": "comparing plain and planned steps on real values",
}


def _search(asked: Asked, traces: Path, *, quiet: bool) -> FitResult:
    """The long work: read the workload, plan, measure, verify."""
    from memfit.core.devices import find_gpu
    from memfit.planning.fit import fit as search

    gpu = find_gpu(asked.gpu)
    with progress(quiet=quiet) as update:
        update("loading torch and the workload")
        return search(
            asked.workload,
            gpu=gpu,
            budget=asked.budget,
            allow=asked.allow.value,
            verify=asked.verify,
            engine=asked.engine.value,
            traces=traces,
            progress=lambda stage, done, total: update(STAGES.get(stage, stage), done, total),
            compiled=asked.compiled,
            host_memory=asked.host_memory,
        )


def _without_traces(result: dict[str, Any]) -> dict[str, Any]:
    """The result without the names of traces that are gone."""
    for step in ("plain", "planned"):
        if result[step] is not None:
            result[step] = {**result[step], "trace_path": None}
    return result


def _report(asked: Asked, result: FitResult) -> FitReport:
    from memfit import __version__
    from memfit.reports.report import FitReport

    versions = {"memfit": __version__, **({"torch": result.torch} if result.torch else {})}
    plan_path = None if asked.plan_file is None or result.plan is None else str(asked.plan_file)
    return FitReport.of(
        result, allow=asked.allow.value, command=asked.command(), plan_path=plan_path, versions=versions
    )


def _write(asked: Asked, report: FitReport) -> dict[str, Path]:
    """Write the files that were asked for; name → path of those written."""
    from memfit.core.files import write_atomically

    written: dict[str, Path] = {}
    if asked.plan_file is not None and report.result.plan is not None and not report.is_refuted:
        written["plan"] = report.result.plan.save(asked.plan_file)
    if asked.report is not None:
        from memfit.reports.html import fit_page

        written["report"] = write_atomically(asked.report, fit_page(report))
    if asked.png is not None:
        from memfit.reports.figures import render_figures

        for name, data in render_figures(report).items():
            written[f"png_{name}"] = write_atomically(asked.png / f"memfit-{name}.png", data)
    return written


def _print(asked: Asked, report: FitReport, written: Mapping[str, Path]) -> None:
    from rich.console import Group
    from rich.text import Text

    from memfit.reports.text import fit_text

    lines: list[Any] = [fit_text(report), ""]
    lines += [
        Text.assemble((f"{name.replace('_', ' ')}: ", "dim"), str(path)) for name, path in written.items()
    ]
    if asked.report is None:
        lines.append(Text("--report memfit-report.html writes this with charts as one page.", style="dim"))
    show(Group(*lines))
