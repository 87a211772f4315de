"""`memfit dryrun`: a user's own script on a made-up GPU, and the account of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED, EXIT_RUN_TIME_ERROR
from memfit.cli.options import GPU

if TYPE_CHECKING:
    from memfit.dryrun.result import DryRunResult


def dryrun(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT ...",
            help="What to run: train.py and its arguments, python -m module, torchrun train.py … "
            "Put -- in front of it.",
        ),
    ],
    gpu: Annotated[str, GPU],
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="How many of them the script's machine has (default: 1)."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            metavar="N",
            help="Run the script as one rank of a job of N, a GPU each; the other ranks are absent.",
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            metavar="R",
            help="Which rank to run, or all: every one whose memory can differ "
            "(default: 0 of --world-size, all of torchrun's).",
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node", metavar="N", help="Ranks, and GPUs, on each machine of the job (default: 8)."
        ),
    ] = None,
    steps: Annotated[
        str,
        typer.Option(
            "--steps", metavar="N", help="End after so many optimizer steps, or run to the end: all."
        ),
    ] = "3",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; all that the script prints goes to stderr."),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option("--snapshot", metavar="FILE", help="Save PyTorch's memory snapshot (for memory_viz)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Save memfit's trace of all allocator events."),
    ] = None,
    allow_writes: Annotated[
        bool,
        typer.Option(
            "--allow-writes",
            help="Let the script write its own files and reach its loggers. Tensors here are not "
            "real: a checkpoint would be overwritten with zeros.",
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="End after so long, with what is known by then."),
    ] = None,
    repeats: Annotated[
        str | None,
        typer.Option(
            "--repeats",
            metavar="N",
            help="Run again so often at most, with other answers where the script reads values that only a "
            "GPU knows; or none. Unless given, 4 where they certainly steer the script.",
        ),
    ] = None,
    real_host_values: Annotated[
        bool,
        typer.Option(
            "--real-host-values",
            help="Compute large tensors of the host at once. Unless given they are computed only when the "
            "script looks at their values, so that a large model needs little host memory.",
        ),
    ] = False,
) -> int:
    """Run a training script, unmodified, on a made-up GPU and account for its memory.

    Needs no GPU. The script's files are written to a scratch folder, and network loggers are off.

    With --world-size, or under torchrun with several processes, each rank runs by itself, with PyTorch's own
    process groups; the figures are those of the fullest rank, and of its fullest GPU.

    Exit code 0 when it fits, 4 when it does not, 1 when the script itself fails, 130 when it was ended early.
    """
    from memfit.cli.output import check_output
    from memfit.core.devices import find_gpu
    from memfit.dryrun.script import run_script

    check_output(snapshot, option="--snapshot", suffixes=(".pickle", ".pkl"))
    check_output(trace, option="--trace", suffixes=(".memfit-trace",))
    result = run_script(
        command,
        gpu=find_gpu(gpu),
        gpus=gpus,
        world_size=world_size,
        rank=parse_rank(rank),
        nproc_per_node=nproc_per_node,
        steps=parse_steps(steps),
        trace=trace,
        snapshot=snapshot,
        allow_writes=allow_writes,
        timeout_seconds=timeout,
        output="stderr" if as_json else "stdout",
        repeats=parse_repeats(repeats),
        real_host_values=real_host_values,
    )
    files = {name: str(path) for name, path in (("snapshot", snapshot), ("trace", trace)) if path is not None}
    if as_json:
        print_json({**result.to_json(), "files": files})
    else:
        _print(result, files)
    return exit_code(result)


def parse_steps(text: str) -> int | Literal["all"]:
    """The value of ``--steps``. Raises UsageError where it is neither a number nor ``all``."""
    from memfit.core.errors import UsageError

    if text == "all":
        return "all"
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--steps {text}: give a number of optimizer steps, 1 or more, or all")
    return int(text)


def parse_repeats(text: str | None) -> int | None:
    """The value of ``--repeats``; None: as many as memfit thinks right. Raises UsageError."""
    from memfit.core.errors import UsageError

    if text is None or text == "none":
        return None if text is None else 0
    if not text.isdigit():
        raise UsageError(f"--repeats {text}: give a number of repeats, or none")
    return int(text)


def parse_rank(text: str | None) -> int | Literal["all"] | None:
    """The value of ``--rank``. Raises UsageError where it is neither a number nor ``all``."""
    from memfit.core.errors import UsageError

    if text is None or text == "all":
        return "all" if text else None
    if not text.isdigit():
        raise UsageError(f"--rank {text}: give the number of a rank, or all")
    return int(text)


def exit_code(result: DryRunResult) -> int:
    """What the command ends with: the account's verdict, unless the script ended otherwise."""
    if result.ended in ("interrupted", "timeout"):
        return EXIT_INTERRUPTED
    if result.ended == "out_of_memory":
        return EXIT_DOES_NOT_FIT
    if result.exit_code != 0:
        return EXIT_RUN_TIME_ERROR
    return 0 if result.fits else EXIT_DOES_NOT_FIT


def _print(result: DryRunResult, files: dict[str, str]) -> None:
    from memfit.reports.dryrun import dry_run_text

    show(dry_run_text(result))
    for name, path in files.items():
        typer.echo(f"{name.capitalize()}: {path}")
