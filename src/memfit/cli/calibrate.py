"""`memfit calibrate`: measure what libraries take on this machine's GPU, and remember it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_CANNOT_RUN

if TYPE_CHECKING:
    from memfit.dryrun.calibration import Calibration

SCHEMA_VERSION = 1
MADE_UP_GPU = "MEMFIT_GPU_NAME"
"""Set where this process is part of a dry run."""
_WHERE = "run it where the GPU is, with a CUDA build of PyTorch"


def calibrate(
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="The name under which to remember it (see `memfit gpus`); unless given, by what the driver "
            "calls it. With --forget: whose measurements to remove.",
        ),
    ] = None,
    list_known: Annotated[
        bool, typer.Option("--show", help="Show what was measured; measure nothing.")
    ] = False,
    forget_known: Annotated[
        bool, typer.Option("--forget", help="Remove what was measured, of --gpu or of every GPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Measure on a GPU what memfit's predictions for it cannot know: context, workspaces of cuDNN.

    Two small training steps and some convolutions run in a process of their own, in less than a minute. What
    is measured is kept in a file of yours and narrows later predictions for the same GPU and version of
    PyTorch.

    Exit code 0 when measured, 6 where there is no GPU.
    """
    from memfit.core.errors import UsageError
    from memfit.dryrun.calibration import all_calibrations, remember

    if list_known and forget_known:
        raise UsageError("--show and --forget exclude each other")
    if forget_known:
        return _forget(gpu, as_json=as_json)
    if list_known:
        _tell([found for _, found in all_calibrations()], as_json=as_json)
        return 0
    found = _measured(gpu)
    made_up = MADE_UP_GPU in os.environ
    _tell([found], as_json=as_json, file=None if made_up else remember(found))
    if made_up and not as_json:
        typer.echo("Not remembered: the GPU of a dry run measures nothing.")
    return 0


def _forget(gpu: str | None, *, as_json: bool) -> int:
    from memfit.core.devices import find_gpu
    from memfit.dryrun.calibration import forget

    count = forget(None if gpu is None else find_gpu(gpu).key)
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "forgotten": count})
    else:
        typer.echo(f"Forgotten: {count} calibration{'' if count == 1 else 's'}.")
    return 0


def _measured(gpu: str | None) -> Calibration:
    """Runs the measuring process. Raises CannotRunHere where there is no GPU."""
    from memfit.core.devices import find_gpu
    from memfit.core.errors import CannotRunHere, ToolFailure
    from memfit.dryrun.calibration import Calibration

    _need_gpu()
    with tempfile.TemporaryDirectory(prefix="memfit-calibrate-") as folder:
        file = Path(folder) / "readings.json"
        words = [sys.executable, "-P", "-m", "memfit.dryrun.calibration_steps", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        if done.returncode == EXIT_CANNOT_RUN:
            raise CannotRunHere(f"{last}; {_WHERE}")
        if done.returncode or not file.exists():
            raise ToolFailure(f"measuring the GPU failed: {last}")
        readings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    key = find_gpu(gpu or readings["name"]).key
    return Calibration.from_json({"schema_version": SCHEMA_VERSION, "gpu": key, **readings})


def _need_gpu() -> None:
    """Raises CannotRunHere, in one line, where the driver finds no GPU."""
    import pynvml

    from memfit.core.errors import CannotRunHere

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        count = 0
    if not count:
        raise CannotRunHere(f"memfit calibrate measures a GPU, and there is none here; {_WHERE}")


def _tell(found: list[Calibration], *, as_json: bool, file: Path | None = None) -> None:
    from memfit.reports.calibration import calibration_text

    if as_json:
        whole = {"schema_version": SCHEMA_VERSION, "calibrations": [one.to_json() for one in found]}
        print_json(whole if file is None else {**whole, "file": str(file)})
        return
    if not found:
        typer.echo("Nothing was measured yet: memfit calibrate, on a machine with a GPU.")
    for one in found:
        show(calibration_text(one))
    if file is not None:
        typer.echo(f"Remembered in {file}")
