"""`memfit dashboard`: what the monitor sees, as a live page in a browser."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE|FOLDER",
            help="Show a recording (any file that memfit replay reads), a run folder of memfit.watch() or "
            "what nvidia-smi printed, instead of this machine.",
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            "--bind", metavar="ADDRESS", help="Address to listen on; beyond this machine a token is needed."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port to listen on; 0 is any free one.")
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="MEMFIT_TOKEN",
            metavar="TEXT",
            help="What visitors must show; made unless given. Rather in MEMFIT_TOKEN than here, where others "
            "on this machine can read it.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="A name of this server, as behind a proxy (repeatable)."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between readings.")
    ] = 1.0,
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
            "--on-alert", metavar="COMMAND", help="Run this when an alert begins or ends; no shell."
        ),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="POST alerts to this address as JSON.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep readings of the GPUs on disk.")] = True,
    browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
) -> int:
    """Show memory live in a browser: account, timeline, steps, growth, places, alerts, findings.

    Only this machine can reach it, unless --bind says otherwise. The page only shows: nothing can be changed
    or run through it. Ctrl-C ends it.

    Exit code 0, also when ended with Ctrl-C; 5 where the source cannot be read; 6 where it cannot listen, or
    FastAPI is missing.
    """
    from memfit.cli.live_findings import findings_of
    from memfit.cli.monitoring import check_interval, make_monitor
    from memfit.dashboard.feeds import make_feed
    from memfit.dashboard.server import Dashboard
    from memfit.monitor.identity import runs_folder
    from memfit.monitor.opening import open_source

    check_interval(interval)
    check_token(token)
    opened = open_source(source, speed=speed)
    monitor = make_monitor(opened, rules=rules, command=on_alert, webhook=webhook, keep=keep)
    feed = make_feed(
        opened, monitor, findings=findings_of(opened, source), device_history=runs_folder().parent / "devices"
    )
    served = Dashboard(feed, bind=bind, port=port, token=token, hosts=host or (), interval_seconds=interval)
    try:
        served.start()
        typer.echo(f"Dashboard: {served.first_url}")
        if browser:
            typer.launch(served.first_url)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass  # the ordinary way to end it
    finally:
        served.close()
    return 0


def check_token(token: str | None) -> None:
    """A token must be hard to guess, and fit into a cookie; raises UsageError."""
    import re

    from memfit.core.errors import UsageError

    if token is not None and not re.fullmatch(r"[A-Za-z0-9_\-]{12,200}", token):
        raise UsageError("--token: give 12 to 200 letters, digits, - and _ (or nothing, and one is made)")
