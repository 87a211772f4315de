"""PyTorch's own allocator on the made-up GPU does what was recorded: 31 training runs of three steps."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.dryrun.build import build_stub, torch_build
from memfit.dryrun.environment import preloaded

pytestmark = pytest.mark.dryrun

RECORDED = Path(__file__).parents[1] / "data" / "golden_train"
NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz")))
RECORDED_WITH = "2.14.1+cu130"


def recorded(name: str) -> dict[str, Any]:
    result = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    del result["device"]  # the name that the device was given
    return result


def frees_sorted(events: list[list[Any]]) -> list[list[Any]]:
    """The events with each run of consecutive frees in one order: autocast drops its copies in any order."""
    result: list[list[Any]] = []
    frees: list[list[Any]] = []
    for event in events:
        if event[0] == "f":
            frees.append(event)
        else:
            result += [*sorted(frees), event]
            frees = []
    return result + sorted(frees)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job's result now."""
    if torch_build().version != RECORDED_WITH:
        pytest.skip(f"recorded with torch {RECORDED_WITH}, and this is {torch_build().version}")
    folder = tmp_path_factory.mktemp("golden")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")}
    env["LD_PRELOAD"] = preloaded(build_stub(), None)
    env["MEMFIT_GPU_TOTAL_BYTES"] = str(80 << 30)
    env["OMP_NUM_THREADS"] = "1"
    script = Path(__file__).with_name("golden_training.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *NAMES],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr[-3000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}


def test_all_recorded_runs_are_here() -> None:
    assert len(NAMES) == 31


@pytest.mark.parametrize("name", NAMES)
def test_sizes_peaks_counts_and_layouts_are_equal(name: str, replayed: dict[str, dict[str, Any]]) -> None:
    events = "last_step_events"
    want, got = recorded(name), replayed[name]
    assert {k: v for k, v in got.items() if k != events} == {k: v for k, v in want.items() if k != events}


@pytest.mark.parametrize("name", NAMES)
def test_events_are_equal(name: str, replayed: dict[str, dict[str, Any]]) -> None:
    want, got = recorded(name)["last_step_events"], replayed[name]["last_step_events"]
    if got != want:
        assert "bf16" in name and not name.startswith("cnn"), "only autocast's frees may change their order"
    assert frees_sorted(got) == frees_sorted(want)
