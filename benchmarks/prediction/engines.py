"""Running a case: by the dry run or by the portable engine, in a process of its own each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit import dry_run
from memfit.core.errors import MemfitError
from memfit.dryrun.libraries import LOADED_KERNELS
from memfit.dryrun.result import DryRunResult
from prediction.case import SCRIPTS, Case

READING = "memfit-prediction-reading.json"
PORTABLE = Path(__file__).resolve().parent / "portable_run.py"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an engine said about a case.

    Args:
        engine: ``"dryrun"`` or ``"portable"``.
        predicted_bytes: the figure that the row is held against; None where it came to none.
        figures: of the whole run, in bytes: ``requested``, ``allocated``, ``reserved``, ``device``,
            ``context``; and ``reading``, what the script read itself.
        fits: whether it fits in the GPU.
        seconds: from the start of the process to its end.
        torch: version of PyTorch.
        confidence: the result's own word for how far it can be trusted.
        not_modelled: what the result says that it leaves out.
        details: what the script left beside its reading.
        error: why there is no figure.
    """

    engine: str
    predicted_bytes: int | None
    figures: Mapping[str, int]
    fits: bool
    seconds: float
    torch: str = ""
    confidence: str = ""
    not_modelled: tuple[str, ...] = ()
    details: Mapping[str, Any] | None = None
    error: str = ""


def predict(case: Case, engine: str) -> Prediction:
    """Run the case; a failure is a prediction with an error."""
    begun = time.monotonic()
    try:
        return (by_dry_run if engine == "dryrun" else by_portable_engine)(case)
    except MemfitError as problem:
        seconds = time.monotonic() - begun
        return Prediction(
            engine=engine, predicted_bytes=None, figures={}, fits=False, seconds=seconds, error=str(problem)
        )


def by_dry_run(case: Case) -> Prediction:
    """As ``memfit dryrun`` does it, to the script's own end; the fullest of the ranks that are run."""
    found = [_run_rank(case, rank) for rank in case.ranks]
    fullest = max(found, key=lambda run: (bool(run.error), run.predicted_bytes or 0))
    return replace(fullest, seconds=sum(run.seconds for run in found))


def _run_rank(case: Case, rank: int) -> Prediction:
    words = [sys.executable, str(SCRIPTS / case.script), *case.words]
    job: dict[str, Any] = {}
    if case.world_size is not None:
        job = {"world_size": case.world_size, "rank": rank}
    with _variables(case.environment):
        result = dry_run(words, gpu=case.gpu, steps="all", repeats=0, output="stderr", **job)
    told: dict[str, Any] = {}
    if result.scratch_folder is not None:
        scratch = Path(result.scratch_folder)
        for file in scratch.rglob(READING):
            told = json.loads(file.read_text(encoding="utf-8"))
        shutil.rmtree(scratch, ignore_errors=True)
    return prediction_of(case, result, told)


def prediction_of(case: Case, result: DryRunResult, told: Mapping[str, Any]) -> Prediction:
    """What a dry run of the case found, and its script told."""
    figures = {
        "requested": result.peak_requested_bytes,
        "allocated": result.peak_allocated_bytes,
        "reserved": result.peak_reserved_bytes,
        "device": result.device_total_bytes,
        "context": result.context_bytes,
        "bare context": result.context_bytes - int(LOADED_KERNELS.expected),
    }
    if result.device_memory is not None:
        figures["expected"] = result.device_memory.expected_bytes
    error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
    return _prediction(
        case,
        engine="dryrun",
        figures=figures,
        told=told,
        fits=result.fits,
        seconds=result.wall_seconds,
        torch=result.torch,
        confidence=result.confidence,
        not_modelled=result.not_modelled,
        error=error if result.oom is None else "",
    )


def by_portable_engine(case: Case) -> Prediction:
    """The same script on meta tensors and the imitated allocator."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PORTABLE), case.gpu, str(SCRIPTS / case.script), *case.words],
        env={**os.environ, **case.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begun
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return Prediction(
            engine="portable", predicted_bytes=None, figures={}, fits=False, seconds=seconds, error=last
        )
    return _prediction(case, engine="portable", seconds=seconds, **json.loads(lines[-1]))


def _prediction(
    case: Case, *, figures: Mapping[str, int], told: Mapping[str, Any], error: str, **rest: Any
) -> Prediction:
    if "reading" in told:
        figures = {**figures, "reading": told["reading"]}
    predicted = figures.get(case.counter)
    if predicted is None and not error and rest["fits"]:
        error = f"the script left no {case.counter}"
    if predicted is not None and case.above:
        predicted -= figures[case.above]
    return Prediction(
        predicted_bytes=None if error else predicted,
        figures=figures,
        error=error,
        details={key: value for key, value in told.items() if key != "reading"} or None,
        **rest,
    )


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
