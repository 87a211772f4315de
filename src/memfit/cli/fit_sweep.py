"""`memfit fit --sweep`: the whole front of a workload, in text, JSON, one page and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.cli.console import print_json, progress, show
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.cli.fit import Asked
    from memfit.planning.sweep import SweepResult

STAGES: Mapping[str, str] = {
    "plain step": "running the plain step",
    "leanest plans": "measuring what blocks can keep, running known schedules",
    "front": "planning for one budget after another",
    "lower bound": "proving how little must be computed again",
}


def run_sweep(asked: Asked, *, points: int, as_json: bool) -> int:
    """Draws the front; exit code 0."""
    if asked.budget is not None or asked.plan_file is not None:
        option = "--budget" if asked.budget is not None else "--plan"
        raise UsageError(
            f"{option} is for one plan, and --sweep draws them for all budgets: leave one of the two out"
        )
    result = _search(asked, points, quiet=as_json)
    written = _write(asked, result, points)
    if as_json:
        print_json({**result.to_json(), "files": {name: str(path) for name, path in written.items()}})
    else:
        from rich.console import Group

        from memfit.reports.sweep import sweep_text

        show(Group(sweep_text(result), *(f"{name}: {path}" for name, path in written.items())))
    return 0


def _search(asked: Asked, points: int, *, quiet: bool) -> SweepResult:
    from memfit.planning.sweep import sweep

    with progress(quiet=quiet) as update:
        update("loading torch and the workload")
        return sweep(
            asked.workload,
            gpu=asked.gpu,
            points=points,
            allow=asked.allow.value,
            engine=asked.engine.value,
            host_memory=asked.host_memory,
            progress=lambda stage, done, total: update(STAGES.get(stage, stage), done, total),
        )


def _write(asked: Asked, result: SweepResult, points: int) -> dict[str, Path]:
    from memfit.core.files import write_atomically
    from memfit.reports.sweep import sweep_page, sweep_png

    written: dict[str, Path] = {}
    if asked.report is not None:
        page = sweep_page(result, command=asked.command("--sweep", "--points", str(points)))
        written["report"] = write_atomically(asked.report, page)
    if asked.png is not None:
        written["png"] = write_atomically(asked.png / "memfit-sweep.png", sweep_png(result))
    return written
