"""`memfit.watch`: records that survive a kill, forks left alone, and a training that never notices."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit
from memfit.core.errors import UsageError
from memfit.monitor import watching
from memfit.monitor.engine import Monitor
from memfit.monitor.estimates import growth
from memfit.monitor.identity import identify
from memfit.monitor.opening import open_source
from memfit.monitor.runs import RunSource, read_records

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_watcher_left() -> Iterator[None]:
    yield
    watching._stop_all()


def script(code: str, *words: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_records_steps_and_host_memory(tmp_path: Path) -> None:
    with memfit.watch(folder=tmp_path, interval=0.005, job="a job/with: odd name") as watcher:
        for _ in range(3):
            watcher.step()
            time.sleep(0.01)
        assert memfit.watch(folder=tmp_path / "other") is watcher
    (record,) = read_records(tmp_path)
    assert record.about["job"] == "a-job-with-odd-name" and record.ended_seconds is not None
    sample = RunSource(tmp_path).read(time.time())
    assert [step.number for step in sample.steps] == [1, 2, 3]
    assert sample.steps[1].seconds is not None and sample.steps[1].seconds >= 0.01
    assert sample.host is not None and sample.host.rss_bytes is not None and sample.host.rss_bytes > 10 * MIB
    assert not record.alive(time.time())
    assert memfit.watch(folder=False) is not watcher


def test_a_killed_process_leaves_its_records_and_a_fork_touches_nothing(tmp_path: Path) -> None:
    code = (
        "import memfit, os, signal, sys\n"
        "watcher = memfit.watch(folder=sys.argv[1], interval=0.01)\n"
        "watcher.step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    watcher.step(); watcher.sample(); watcher.stop()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "watcher.step(); watcher.sample()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script(code, str(tmp_path), expect=-signal.SIGKILL)
    (record,) = read_records(tmp_path)
    assert record.ended_seconds is None
    assert [step.number for step in RunSource(tmp_path).read(0).steps] == [1, 2]
    assert not record.alive(time.time() + 60)


def test_ends_by_itself_at_exit_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import memfit, sys, logging\n"
        "memfit.watch(folder=sys.argv[1], interval=0.01)\n"
        "memfit.watch().step()\n"
        "print([name for name in ('torch', 'fastapi', 'rich') if name in sys.modules])\n"
    )
    assert script(code, str(tmp_path)).strip() == "[]"
    (record,) = read_records(tmp_path)
    assert record.ended_seconds is not None


def test_never_disturbs_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a folder that cannot be, nor a monitor that fails: they are logged, once each."""
    (tmp_path / "file").write_text("")

    def fail(*_: object) -> None:
        raise MemoryError("boom")

    monkeypatch.setattr(Monitor, "poll", fail)
    with (
        caplog.at_level(logging.WARNING),
        memfit.watch(folder=tmp_path / "file" / "x", interval=0.001) as watcher,
    ):
        watcher.step()
        for _ in range(1000):
            if watcher.failures >= 3:
                break
            time.sleep(0.01)
    assert watcher.failures >= 3
    texts = [record.getMessage() for record in caplog.records]
    assert sum("keeps no records" in text for text in texts) == 1
    assert sum("MemoryError: boom" in text for text in texts) == 1


def test_what_cannot_be_meant_is_an_error() -> None:
    for interval in (0, -1, True, "1"):
        with pytest.raises(UsageError, match="give seconds"):
            memfit.watch(interval=interval, folder=False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown quantity"):
        memfit.AlertRule(name="x", quantity="y", above=1)


def test_ranks_of_one_launch_share_a_run() -> None:
    torchrun = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_PORT": "29500",
    }
    first, second = identify("job", torchrun), identify("job", {**torchrun, "RANK": "4"})
    assert first.run == second.run == f"job-launch{os.getppid()}-29500"
    assert (first.rank, first.local_rank, first.world_size) == (3, 1, 8)
    assert (
        identify(None, {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "big", "SLURM_PROCID": "2"}).run == "big-77"
    )
    assert identify("../../etc", {}).run.startswith("etc-")


def test_runs_that_ended_are_forgotten_and_running_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_RUNS", str(tmp_path))
    monkeypatch.setattr("memfit.monitor.runs.MOST_RUNS_KEPT", 2)
    for number in range(4):
        with memfit.watch(folder=tmp_path / f"run{number}"):
            pass
        os.utime(tmp_path / f"run{number}", (number, number))
    from memfit.monitor.runs import forget_old_runs

    (tmp_path / "mine").mkdir()
    forget_old_runs(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"run2", "run3", "mine"}


@pytest.mark.dryrun
def test_sees_the_real_allocator(tmp_path: Path) -> None:
    """PyTorch's compiled allocator on the made-up GPU: the dry run's own account is the truth."""
    train = tmp_path / "train.py"
    train.write_text(
        "import sys, memfit, torch\n"
        "watcher = memfit.watch(folder=sys.argv[1], interval=0.02)\n"
        "model = torch.nn.Linear(1000, 1000).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "kept = []\n"
        "for _ in range(40):\n"
        "    kept.append(torch.empty(3 << 20, dtype=torch.uint8, device='cuda'))\n"
        "    model(torch.randn(64, 1000, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    watcher.step()\n"
        "watcher.stop()\n"
        "assert watcher.failures == 0\n"
    )
    run = tmp_path / "run"
    result = memfit.dry_run([str(train), str(run)], gpu="a100-80gb", steps="all", allow_writes=True)
    assert result.error is None, result.error
    sample = RunSource(run).read(time.time())
    (one,) = sample.allocators
    peaks = [step.peak_bytes for step in sample.steps]
    assert len(peaks) == 40 and max(peaks) == result.peak_allocated_bytes  # type: ignore[type-var]
    assert one.run_peak_bytes == result.peak_allocated_bytes and one.step_peak_bytes == peaks[-1]
    assert one.reserved_bytes is not None and one.reserved_bytes == result.peak_reserved_bytes
    assert one.allocated_bytes == sample.steps[-1].end_bytes and one.alloc_retries == one.ooms == 0
    assert one.allocated_by_pool["large"] + one.allocated_by_pool["small"] == one.allocated_bytes
    assert (
        one.free_cached_bytes and one.largest_free_bytes and one.largest_free_bytes <= one.free_cached_bytes
    )
    found = growth([step.number for step in sample.steps], [step.end_bytes or 0 for step in sample.steps])
    assert found is not None and found.bytes_per_unit == 3 << 20
    status = Monitor(open_source(run).sources).poll()
    assert status.trends[one.key].per_step == found
    assert sum(part.held_bytes for part in status.accounts[one.uuid]) == one.total_bytes


@pytest.mark.parametrize("name", ["watch_training", "watch_hf_trainer", "watch_lightning"])
@pytest.mark.filterwarnings("ignore")
def test_examples(name: str, tmp_path: Path) -> None:
    pytest.importorskip(
        {"watch_hf_trainer": "transformers", "watch_lightning": "lightning"}.get(name, "torch")
    )
    module = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    module["main"](4, folder=str(tmp_path))
    steps = RunSource(tmp_path).read(time.time()).steps
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert json.loads(next(tmp_path.glob("*/process.json")).read_text())["ended_seconds"]
