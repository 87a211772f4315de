"""`memfit export`: what the monitor sees, for Prometheus to scrape."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from memfit.monitor.engine import Monitor


def export(
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port to listen on; 0 is any free one.")
    ] = 9464,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", help="Time between readings, 1 or more.")
    ] = 1.0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE|FOLDER",
            help="Export a recording or a run folder of memfit.watch() instead of this machine.",
        ),
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--speed", metavar="N", help="Play the source, N times as fast as it was.")
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--alerts", metavar="FILE", help="Alert rules as YAML, beside the shipped ones."),
    ] = None,
    process_labels: Annotated[
        bool,
        typer.Option("--process-labels", help="Label ranks with their pid: a new series with every restart."),
    ] = False,
    once: Annotated[bool, typer.Option("-1", "--once", help="Print the metrics once and end.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--write-data",
            metavar="FOLDER",
            help="Write the Grafana dashboard and the Prometheus alert rules there, and end.",
        ),
    ] = None,
) -> int:
    """Serve metrics for Prometheus at /metrics, and /healthz.

    Reads at most once a second; a scrape touches neither the driver nor CUDA. Ctrl-C ends it.

    Exit code 0, also when ended with Ctrl-C; 6 where it cannot listen or prometheus-client is missing.
    """
    from memfit.cli.monitoring import check_interval, make_monitor
    from memfit.monitor.exporter import Exporter, is_loopback
    from memfit.monitor.opening import open_source

    if data is not None:
        return _write_data(data)
    check_interval(interval, shortest=1.0)
    opened = open_source(source, speed=speed)
    monitor = make_monitor(opened, rules=rules, command=None, webhook=None, keep=False)
    if once:
        _print_once(monitor, process_labels=process_labels)
        return 0
    exporter = Exporter(
        monitor, bind=bind, port=port, interval_seconds=interval, process_labels=process_labels
    )
    typer.echo(f"Metrics: {exporter.url}/metrics", err=True)
    if not is_loopback(bind):
        typer.echo("Anyone who reaches this address can read them; there is no password.", err=True)
    try:
        exporter.start()
        threading.Event().wait()
    except KeyboardInterrupt:
        pass  # the ordinary way to end it
    finally:
        exporter.close()
    return 0


def _print_once(monitor: Monitor, *, process_labels: bool) -> None:
    from memfit.monitor.exposition import StepTotals, render

    status = monitor.poll()
    steps: dict[str, StepTotals] = {}
    for step in status.sample.steps:
        steps.setdefault(step.key, StepTotals()).add(step)
    content, _ = render(status, steps=steps, process_labels=process_labels)
    typer.echo(content.decode(), nl=False)
    monitor.close()


def _write_data(folder: Path) -> int:
    from importlib.resources import files

    from memfit.core.files import write_atomically

    for entry in sorted(files("memfit.monitor").joinpath("data").iterdir(), key=lambda entry: entry.name):
        typer.echo(str(write_atomically(folder / entry.name, entry.read_bytes())))
    return 0
