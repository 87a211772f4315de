"""`memfit replay`: what a recording needs of memory, under every setting and policy, and what to set."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT

if TYPE_CHECKING:
    from memfit.allocators.lab import Replay
    from memfit.core.recording import Recording


class OnOom(StrEnum):
    """What a replay does where memory runs out."""

    stop = "stop"
    skip = "skip"


def replay(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A PyTorch memory snapshot, a torch.profiler trace, memfit's trace, an RMM log or JSON "
            "lines, plain or gzip; - is stdin.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Compare with this allocation policy (repeatable); all (the default) or caching for none.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replay with this allocator setting, like expandable_segments=True (repeatable).",
        ),
    ] = None,
    conf: Annotated[
        str | None,
        typer.Option(
            "--conf",
            metavar="TEXT",
            help="Replay with this value of PYTORCH_ALLOC_CONF, read as strictly as PyTorch reads it.",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity",
            metavar="SIZE",
            help="Memory of the device, like 24GiB. Default: what the file says, or else no limit.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    placements: Annotated[
        bool,
        typer.Option("--placements", help="With --json: where each allocation landed, segments, statistics."),
    ] = False,
    on_oom: Annotated[
        OnOom | None,
        typer.Option(
            "--on-oom",
            metavar="WHAT",
            help="Where memory runs out: stop there, as a program does, or skip the allocation and go on "
            "(the default with --placements).",
        ),
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", metavar="EVENT", help="Show the segments after this event, too (repeatable)."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML page.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also try the other settings and policies.")
    ] = True,
) -> int:
    """Replay recorded allocations through PyTorch's allocator, and find the setting that needs least.

    Needs neither torch nor a GPU. Nothing in a file is ever executed.

    Exit code 0 when it fits, 4 when memory runs out, 5 when the file cannot be read.
    """
    from memfit.cli.output import check_output

    check_output(report, option="--report", suffixes=(".html", ".htm"))
    text = _settings(settings, conf)
    capacity_bytes = _capacity(capacity)
    recording = _read(file)
    stop = on_oom is OnOom.stop if on_oom is not None else not placements
    result = _replay(
        recording,
        quiet=as_json,
        settings=text,
        capacity_bytes=capacity_bytes,
        policies=tuple(policy or ("all",)),
        compare=compare and not placements,
        stop=stop,
        layouts_at=tuple(at or ()),
    )
    files = _write(result, report, file)
    if as_json:
        print_json({**result.to_json(placements=placements), "files": files})
    else:
        _print(result, files, file, tuple(at or ()))
    return 0 if result.fits else EXIT_DOES_NOT_FIT


def _settings(settings: list[str] | None, conf: str | None) -> str | None:
    """What was asked for, as one value of the variable; ``None`` where nothing was."""
    from memfit.allocators.candidates import setting_text
    from memfit.core.errors import UsageError

    if conf is not None and settings:
        raise UsageError("--set and --conf exclude each other: put everything into one of them")
    if conf is not None:
        return conf
    return ",".join(setting_text(words) for words in settings) if settings else None


def _capacity(text: str | None) -> int | None:
    from memfit.core.errors import UsageError
    from memfit.core.units import parse_bytes

    if text is None:
        return None
    size = parse_bytes(text, what="--capacity")
    if size < 1 << 21:
        raise UsageError(f"--capacity {text} is less than one segment (2 MiB)")
    return size


def _read(file: str) -> Recording:
    from memfit.formats import read_trace

    return read_trace(sys.stdin.buffer if file == "-" else file)


def _replay(recording: Recording, *, quiet: bool, **asked: Any) -> Replay:
    from memfit.allocators.lab import replay as run

    with progress(quiet=quiet) as update:
        return run(recording, progress=update, **asked)


def _write(result: Replay, report: Path | None, file: str) -> dict[str, str]:
    if report is None:
        return {}
    from memfit.core.files import write_atomically
    from memfit.reports.replay_page import replay_page

    name = "stdin" if file == "-" else Path(file).name
    return {"report": str(write_atomically(report, replay_page(result, name=name)))}


def _print(result: Replay, files: dict[str, str], file: str, at: tuple[int, ...]) -> None:
    from memfit.reports.replay import replay_text

    show(replay_text(result, name="stdin" if file == "-" else file, events=at))
    for name, path in files.items():
        typer.echo(f"{name.capitalize()}: {path}")
