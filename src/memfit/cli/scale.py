"""`memfit scale`: a workload on several GPUs by each strategy, and the least number of them that fits."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT
from memfit.cli.options import GPU, WORKLOAD, Allow

if TYPE_CHECKING:
    from memfit.distributed.scaling_values import ScaleResult


STRATEGIES = "ddp,zero1,fsdp2,fsdp2-keep,hsdp,tp"
PLANS = "plain,full,planned"


class BatchChoice(StrEnum):
    """Whose batch the workload's is."""

    whole = "whole"
    each = "each"


def scale(
    workload: Annotated[str, WORKLOAD],
    gpu: Annotated[str, GPU],
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="N,N,…", help="How many GPUs to try, all alike.")
    ] = "1,2,4,8",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="How much PyTorch may reserve on each, like 8GiB. Default: what a GPU has to give.",
        ),
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            "--strategies",
            metavar="A,B,…",
            help="Of ddp, zero1, fsdp2, fsdp2-keep (blocks stay whole until the backward pass), hsdp, tp "
            "(every degree up to 8), tp2, tp4+fsdp2 …",
        ),
    ] = STRATEGIES,
    plans: Annotated[
        str,
        typer.Option(
            "--plans",
            metavar="A,B,…",
            help="Of plain, full (every block checkpointed) and planned (memfit's plan, sought where the "
            "plain step does not fit).",
        ),
    ] = PLANS,
    batch: Annotated[
        BatchChoice,
        typer.Option(
            metavar="WHOSE",
            help="whole: the workload's batch is divided among the GPUs; each: every GPU has as much.",
        ),
    ] = BatchChoice.whole,
    allow: Annotated[
        Allow,
        typer.Option(metavar="GRADE", help="How far a plan may move results: exact, reordered, approximate."),
    ] = Allow.exact,
    link_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--link-bandwidth",
            metavar="SIZE/s",
            help="Between GPUs, one direction, like 300GB/s: gives bounds of the step's time.",
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Save the answer's plan, for memfit.distributed.wrap."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Train the answer on real ranks (CPU, in small) and compare."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
) -> int:
    """Compare ways to train a workload on several GPUs, and say how many are needed. Needs no GPU.

    Exit code 0 when something fits, 4 when nothing does, 1 when the workload itself fails, 2 for numbers or
    names that cannot be, 5 for an unreadable workload, 6 where no GPU can be made up.
    """
    from memfit.cli.output import check_output
    from memfit.distributed.scaling import scale as compare

    check_output(report, option="--report", suffixes=(".html", ".htm"))
    check_output(plan_file, option="--plan", suffixes=(".json",))
    with progress(quiet=as_json) as update:
        update("loading torch and the workload")
        result = compare(
            workload,
            gpu=gpu,
            gpus=parse_counts(gpus),
            budget=budget,
            strategies=_words(strategies, option="--strategies"),
            plans=_words(plans, option="--plans"),
            batch=batch.value,
            allow=allow.value,
            link_bytes_per_second=parse_bandwidth(link_bandwidth),
            verify=verify,
            progress=update,
        )
    given = {
        "--gpu": gpu,
        "--gpus": gpus,
        "--budget": budget,
        "--strategies": None if strategies == STRATEGIES else strategies,
        "--plans": None if plans == PLANS else plans,
        "--batch": None if batch == BatchChoice.whole else batch.value,
        "--allow": None if allow == Allow.exact else allow.value,
        "--link-bandwidth": link_bandwidth,
    }
    files = _write(result, report, plan_file, command=_command(workload, given))
    if as_json:
        print_json({**result.to_json(), "files": files})
    else:
        _print(result, files)
    return 0 if result.fits else EXIT_DOES_NOT_FIT


def parse_counts(text: str) -> list[int]:
    """The value of ``--gpus``. Raises UsageError where it is no list of numbers."""
    from memfit.core.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise UsageError(f"--gpus {text}: {part!r} is not a number of GPUs; write 1,2,4,8")
    return [int(part) for part in parts]


def parse_bandwidth(text: str | None) -> float | None:
    """The value of ``--link-bandwidth`` in bytes per second. Raises UsageError."""
    from memfit.core.errors import UsageError
    from memfit.core.units import parse_bytes

    if text is None:
        return None
    size, slash, unit = text.partition("/")
    if not slash or unit.strip() != "s":
        raise UsageError(f"--link-bandwidth {text}: give bytes per second, like 300GB/s")
    count = parse_bytes(size.strip(), what="--link-bandwidth")
    if count < 1:
        raise UsageError(f"--link-bandwidth {text}: give more than nothing")
    return float(count)


def _words(text: str, *, option: str) -> list[str]:
    from memfit.core.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option} {text!r}: name at least one, and nothing empty between commas")
    return words


def _command(workload: str, given: Mapping[str, str | None]) -> str:
    """The command line that does the same again."""
    from memfit.reports.verdict import shell_line

    options = [word for name, value in given.items() if value is not None for word in (name, value)]
    return shell_line(["memfit", "scale", workload, *options])


def _write(
    result: ScaleResult, report: Path | None, plan_file: Path | None, *, command: str
) -> dict[str, str]:
    from memfit.core.files import write_atomically

    written: dict[str, str] = {}
    plan = result.plan
    if plan_file is not None and plan is not None:
        written["plan"] = str(plan.save(plan_file))
    if report is not None:
        from memfit.reports.scale import scale_page

        written["report"] = str(write_atomically(report, scale_page(result, command=command)))
    return written


def _print(result: ScaleResult, files: dict[str, str]) -> None:
    from memfit.reports.scale import scale_text

    show(scale_text(result))
    for name, path in files.items():
        typer.echo(f"{name.capitalize()}: {path}")
