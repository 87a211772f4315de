"""`memfit.dry_run`, as it is called from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.core.errors import InputError, UsageError
from memfit.core.trace import Trace

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown GPU"):
        memfit.dry_run("train.py", gpu="a101")
    with pytest.raises(InputError, match=r"missing\.py"):
        memfit.dry_run("missing.py --lr 1", gpu="a100-80gb")
    with pytest.raises(UsageError, match="allow_writes: for scripts only"):
        memfit.dry_run("hf:gpt2", gpu="a100-80gb", allow_writes=True)
    with pytest.raises(UsageError, match="for scripts only"):
        memfit.dry_run("hf:gpt2", gpu="a100-80gb", steps="all")


@pytest.mark.dryrun
def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = memfit.dry_run(
        f"{SCRIPTS / 'train.py'} --width 512", gpu="a100-80gb", steps=2, output="stderr", repeats=0
    )
    assert (result.steps_done, result.fits, result.gpu) == (2, True, "a100-80gb")


@pytest.mark.dryrun
def test_a_workload(tmp_path: Path) -> None:
    import torch

    width = 1024
    workload = memfit.Workload(
        name="toy",
        model=lambda: torch.nn.Linear(width, width, bias=False),
        batch=lambda: torch.randn(8, width),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    trace = tmp_path / "toy.memfit-trace"
    result = memfit.dry_run(workload, gpu="24GiB,sm89", steps=2, trace=str(trace))
    assert (result.steps_done, result.ended, result.fits, result.oom) == (2, "steps", True, None)
    assert result.peak_by_category["parameter"] == 4 * width * width
    assert result.peak_by_category["optimizer_state"] == 8 * width * width + result.peak_by_category.get(
        "x", 0
    )
    assert len(Trace.load(trace)) == result.event_count > 0
