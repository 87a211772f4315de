"""`memfit monitor`: GPUs, their processes and PyTorch's allocators in them, live in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_FINDINGS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memfit.monitor.engine import Monitor, Status
    from memfit.monitor.opening import Opened


def monitor(
    once: Annotated[bool, typer.Option("-1", "--once", help="Print one reading and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With -1 one JSON object, else JSON lines: one object a reading.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between readings.")
    ] = 1.0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE|FOLDER",
            help="Show a recording (any file that memfit replay reads), a run folder of memfit.watch() or "
            "what nvidia-smi printed, instead of this machine.",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            metavar="N",
            help="Play the source N times as fast as it was; of a trace N steps a second. "
            "Default: all of it at once.",
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--alerts", metavar="FILE", help="Alert rules as YAML, beside the shipped ones."),
    ] = None,
    on_alert: Annotated[
        str | None,
        typer.Option(
            "--on-alert",
            metavar="COMMAND",
            help="Run this when an alert begins or ends, with the alert as JSON on its stdin; "
            "no shell reads it.",
        ),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="POST alerts to this address as JSON.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep readings on disk for the dashboard.")
    ] = True,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="End with exit code 3 where any alert fired.")
    ] = False,
) -> int:
    """Watch GPUs, their processes and PyTorch's allocators in them.

    Needs neither torch nor a GPU: what cannot be seen is said. Ctrl-C ends it.

    Exit code 0, also when ended with Ctrl-C; 3 with --fail-on-alert where an alert fired; 5 where the source
    cannot be read.
    """
    from memfit.cli.monitoring import check_interval, make_monitor
    from memfit.monitor.opening import open_source

    check_interval(interval)
    opened = open_source(source, speed=speed)
    watched = make_monitor(opened, rules=rules, command=on_alert, webhook=webhook, keep=keep and not once)
    try:
        _run(watched, opened, once=once, as_json=as_json, interval=interval)
    finally:
        watched.close()
    fired = any(watched.book.fired_count.values())
    return EXIT_FINDINGS if fail_on_alert and fired else 0


def _run(watched: Monitor, opened: Opened, *, once: bool, as_json: bool, interval: float) -> None:
    if once or opened.whole:
        status = watched.poll()
        if as_json:
            print_json(status.to_json())
        else:
            show(_screen(status, opened, 0.0))
        return
    try:
        if as_json:
            _lines(watched, interval)
        elif sys.stdout.isatty():
            _live(watched, opened, interval)
        else:
            _pages(watched, opened, interval)
    except KeyboardInterrupt:
        return  # the ordinary way to end it


def _screen(status: Status, opened: Opened, interval: float) -> RenderableType:
    from memfit.cli.monitor_screen import monitor_screen

    note = f"every {interval:g} s, Ctrl-C ends" if interval else ""
    return monitor_screen(status, title=opened.title, note=note)


def _lines(watched: Monitor, interval: float) -> None:
    from memfit.cli.monitoring import repeat

    def line() -> bool:
        status = watched.poll()
        sys.stdout.write(json.dumps(status.to_json(), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return not status.sample.ended

    repeat(line, every_seconds=interval)


def _pages(watched: Monitor, opened: Opened, interval: float) -> None:
    from memfit.cli.monitoring import repeat

    def page() -> bool:
        status = watched.poll()
        show(_screen(status, opened, interval))
        sys.stdout.write("\n")
        sys.stdout.flush()
        return not status.sample.ended

    repeat(page, every_seconds=interval)


def _live(watched: Monitor, opened: Opened, interval: float) -> None:
    """The whole terminal is the view; when it ends, the last reading stays in the scrollback."""
    from rich.console import Console
    from rich.live import Live

    from memfit.cli.monitoring import repeat

    status = watched.poll()
    try:
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:

            def draw() -> bool:
                nonlocal status
                status = watched.poll()
                live.update(_screen(status, opened, interval), refresh=True)
                return not status.sample.ended

            repeat(draw, every_seconds=interval)
    finally:
        show(_screen(status, opened, 0.0))
