"""`memfit monitor` as a user sees it: with and without a GPU, on records and traces, its exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memfit import cli
from memfit.cli.monitor_screen import bar, monitor_screen, sparkline
from memfit.monitor import nvml
from memfit.monitor.account import AccountPart
from memfit.monitor.engine import Monitor
from memfit.monitor.identity import identify
from memfit.monitor.runs import RunWriter
from memfit.monitor.samples import HostSample, ProcessSample, Sample
from memfit.reports.text import to_text
from monitor.fakes import GIB, FakeGpu, FakeNvml, FakeSource, a_gpu, a_rank
from monitor.test_playback import training

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMFIT_RUNS", str(tmp_path / "state" / "runs"))
    yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main(["monitor", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a GPU, as far as the driver says."""
    start = nvml.NvmlSource.__init__

    def with_fake(self: nvml.NvmlSource) -> None:
        start(self, FakeNvml(FakeGpu(processes=[(os.getpid(), 30 * GIB)])), pids_are_ours=True)

    monkeypatch.setattr(nvml.NvmlSource, "__init__", with_fake)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.memfit-trace"
    training(40).save(path)
    return path


def test_without_a_gpu_it_says_so_and_shows_the_host(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> str:
        return "no NVIDIA driver here (NVML Shared Library Not Found)"

    monkeypatch.setattr(nvml.NvmlSource, "_start", fail)
    code, out, _ = run("-1")
    assert code == 0 and "host" in out and "no NVIDIA driver here" in out
    code, out, _ = run("-1", "--json")
    content = json.loads(out)
    assert code == 0 and content["devices"] == [] and content["host"]["total_bytes"] > 0
    assert content["schema_version"] == 1 and "no NVIDIA driver" in content["notes"][0]


def test_a_gpu_and_its_processes(run: Run, gpu: None) -> None:
    code, out, _ = run("-1")
    assert code == 0
    assert "gpu0  NVIDIA H100 80GB HBM3" in out and "30.00 GiB of 80.00 GiB  38%" in out
    assert "other processes" in out and str(os.getpid()) in out
    content = json.loads(run("-1", "--json")[1])
    (device,) = content["devices"]
    assert sum(part["bytes"] for part in device["account"]) == device["total_bytes"] == 80 * GIB
    assert device["power_watts"] is None and device["unknown"]["power_watts"] == "driver: Not Supported"


def test_a_running_job_is_found_by_itself_and_merged_with_the_driver(
    run: Run, gpu: None, tmp_path: Path
) -> None:
    writer = RunWriter(tmp_path / "state" / "runs" / "job", identify("train", {}), interval_seconds=1)
    rank = a_rank(uuid="GPU-1", pid=os.getpid(), world_size=1)
    writer.write(Sample(time_seconds=time.time(), allocators=(rank,), host=HostSample(rss_bytes=1)))
    code, out, _ = run("-1")
    writer.close()
    assert code == 0 and "train pid" in out and f"{os.getpid()} gpu0" in out, out
    assert "Tensors 10.00 GiB" in out and "Contexts, libraries 14.00 GiB" in out
    assert "other processes" not in out


def test_a_trace_shows_its_peak_and_its_growth_as_an_alert(
    run: Run, trace_file: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {name: any, quantity: alloc_retries_per_minute, above: -1, severity: info}")
    code, out, _ = run("--source", trace_file, "--alerts", rules, "--fail-on-alert")
    assert code == 3 and "Parameter 100.00 KiB" in out and "its peak" in out and "· any" in out
    assert run("--source", trace_file, "--json")[0] == 0
    code, out, _ = run("--source", trace_file, "--json", "--speed", "200", "--interval", "0.1")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(lines) >= 2
    assert lines[-1]["allocators"][0]["allocated_bytes"] == (100 + 40) << 10
    code, out, _ = run("--source", trace_file, "--speed", "400", "--interval", "0.1")
    assert code == 0 and out.count("memfit monitor") >= 2


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--interval", "0"], 2, "--interval 0: give seconds"),
        (["--speed", "2"], 2, "--speed is for records"),
        (["--source", "missing"], 5, "cannot read"),
        (["--on-alert", "echo 'x"], 2, "No closing quotation"),
        (["--webhook", "file:///etc/passwd"], 2, "no http or https address"),
        (["--alerts", "missing"], 5, "cannot read missing"),
    ],
)
def test_what_cannot_be_meant(words: list[str], code: int, says: str, run: Run) -> None:
    got, out, err = run("-1", *words)
    assert (got, out) == (code, "") and says in err and "Traceback" not in err


def test_ctrl_c_is_the_ordinary_end() -> None:
    code = (
        "import sys; from memfit.cli import main; sys.exit(main(['monitor', '--json', '--interval', '0.1']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["schema_version"] == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")


def test_the_screen() -> None:
    samples = (
        Sample(
            time_seconds=1e9 + second,
            devices=(a_gpu(), a_gpu(1, total_bytes=None, used_bytes=None, free_bytes=None,
                                    reserved_bytes=None, unknown={"used_bytes": "driver: Not Supported"})),
            allocators=(a_rank(0, allocated_bytes=(5 + second) * GIB), a_rank(1, alive=False)),
            processes=(ProcessSample(device="GPU-0", pid=7, unknown={"name": "this is a container"}),),
            host=HostSample(
                total_bytes=GIB, available_bytes=GIB // 2, shm_total_bytes=100, shm_used_bytes=95
            ),
            notes=("something could not be seen",),
        )
        for second in (0, 30)
    )  # fmt: skip
    monitor = Monitor([FakeSource(*samples)])
    monitor.poll()
    text = to_text(monitor_screen(monitor.poll(), title="node"), width=120)
    for expected in (
        "train rank 0 gpu0", "train rank 1 gpu1 (ended)", "unknown of unknown", "✗ shm-full",
        "unknown (this is a",
        "gpu1: memory is unknown (driver: Not Supported)", "· something could not be seen", "0/0",
        "memory 512.00 MiB",
    ):  # fmt: skip
        assert expected in text, text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_bars_and_sparklines() -> None:
    parts = [
        AccountPart(key=key, label=key, held_bytes=held) for key, held in (("allocated", 1), ("free", 3))
    ]
    assert bar(parts, 8).plain == "██······"
    assert bar([], 4).plain == "····"
    assert sparkline([math.nan, 8, 4, 0], top=8) == " █▄ "
    assert len(sparkline(list(range(1000)), columns=24)) == 24
