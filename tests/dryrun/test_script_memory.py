"""The account of a script's memory: it adds up, and it tells where memory ran out."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from preloaded import SCRIPTS, Preloaded

from memfit.core.trace import Action, Trace

pytestmark = pytest.mark.dryrun


def line_of(script: str, text: str) -> int:
    lines = (SCRIPTS / script).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_the_account_adds_up(preloaded: Preloaded, tmp_path: Path) -> None:
    trace = tmp_path / "run.memfit-trace"
    result = preloaded.run("train.py", "--width", "4096", folder=tmp_path, trace=trace).result
    assert sum(result.peak_by_category.values()) == result.peak_requested_bytes
    assert sum(result.peak_by_phase.values()) == result.peak_requested_bytes
    assert max(result.step_peaks) == result.peak_requested_bytes
    assert result.peak_requested_bytes <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    assert result.device_total_bytes == result.context_bytes + result.peak_reserved_bytes
    assert result.fits and result.oom is None

    events = Trace.load(trace)
    sign = np.where(events.action == Action.ALLOC, 1, np.where(events.action == Action.FREE, -1, 0))
    assert int(np.cumsum(sign * events.size_bytes).max()) == result.peak_requested_bytes
    assert len(events) == result.event_count


def test_categories_are_what_the_model_says(preloaded: Preloaded, tmp_path: Path) -> None:
    width = 4096
    result = preloaded.run("train.py", "--width", str(width), folder=tmp_path).result
    parameters = 4 * (64 * width + width + 10 * width + 10)
    assert result.peak_by_category["parameter"] == parameters
    assert result.peak_by_category["gradient"] == parameters
    assert result.peak_by_category["optimizer_state"] == 2 * parameters
    assert (
        result.peak_by_category["workspace"] == 2 * 8_519_680
    )  # one for the forward's thread, one for autograd's


def test_the_snapshot_is_pytorchs_own(preloaded: Preloaded, tmp_path: Path) -> None:
    snapshot = tmp_path / "run.pickle"
    result = preloaded.run("train.py", folder=tmp_path, snapshot=snapshot).result
    content = snapshot.read_bytes()
    assert content[:2] == b"\x80\x04"
    events = pickle.loads(content)["device_traces"][0]
    assert sum(event["action"] == "alloc" for event in events) > 50
    reserved = sum(segment["total_size"] for segment in pickle.loads(content)["segments"])
    assert reserved == result.peak_reserved_bytes


def test_out_of_memory_in_the_forward_names_the_line(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("out_of_memory.py", "65536", folder=tmp_path, gpu="2GiB,sm86")
    oom = outcome.result.oom
    assert (outcome.result.ended, outcome.result.exit_code, outcome.result.fits) == (
        "out_of_memory",
        1,
        False,
    )
    assert oom is not None and not oom.caught
    assert (oom.line, oom.function) == (line_of("out_of_memory.py", "return self.narrow"), "forward")
    assert (oom.op, oom.phase, oom.asked_bytes) == ("aten.addmm", "forward", 65536 * 16384 * 4)
    assert 0 < oom.free_bytes < oom.asked_bytes and oom.message.startswith("CUDA out of memory")
    assert "torch.OutOfMemoryError" in outcome.stderr


def test_out_of_memory_in_the_backward_names_its_caller(preloaded: Preloaded, tmp_path: Path) -> None:
    result = preloaded.run("out_of_memory.py", "2600", folder=tmp_path, gpu="2GiB,sm86").result
    assert result.oom is not None and not result.oom.caught
    assert result.oom.phase == "backward"
    assert (result.oom.line, result.oom.function) == (line_of("out_of_memory.py", ".backward()"), "train")
    assert result.oom.module


def test_a_shortage_that_the_script_catches_is_told(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("out_of_memory.py", "caught", folder=tmp_path, gpu="2GiB,sm86")
    assert outcome.stdout == "too large: 65536\n"
    assert (outcome.result.ended, outcome.result.exit_code, outcome.result.fits) == ("end", 0, False)
    assert outcome.result.oom is not None and outcome.result.oom.caught


def test_a_script_with_its_own_records_sees_its_own(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("own_snapshots.py", folder=tmp_path)
    assert outcome.result.exit_code == 0, outcome.stderr
    assert outcome.result.peak_requested_bytes == 4 * (1024 * 1024 + 1024) + 4 * (1 << 26)
