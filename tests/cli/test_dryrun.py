"""`memfit dryrun` as a user runs it: real processes, exit codes, and what is on stdout and stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from memfit.cli.dryrun import exit_code, parse_steps
from memfit.core.errors import UsageError
from memfit.dryrun.result import DryRunResult

SCRIPTS = Path(__file__).parents[1] / "scripts"
MEMFIT = [sys.executable, "-m", "memfit", "dryrun"]


def dryrun(*words: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MEMFIT, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--gpu", "a100-80gb", "--", "missing.py"], 5, "cannot read the script missing.py: No such file"),
        (["--gpu", "a101", "--", "train.py"], 2, "unknown GPU 'a101'"),
        (["--gpu", "a100-80gb", "--steps", "0", "--", "train.py"], 2, "--steps 0"),
        (["--gpu", "a100-80gb", "--timeout", "-1", "--", "train.py"], 2, "more than 0 seconds"),
        (["--gpu", "a100-80gb", "--trace", "x.txt", "--", "train.py"], 2, "ends in .memfit-trace"),
        (["--gpu", "a100-80gb", "--world-size", "8", "--rank", "8", "--", "train.py"], 2, "ranks 0 to 7"),
        (["--", "train.py"], 2, "--gpu"),
        (["--gpu", "a100-80gb"], 2, "SCRIPT"),
    ],
)
def test_bad_input_is_one_line_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], code: int, message: str,
) -> None:  # fmt: skip
    from memfit.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["dryrun", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err
    assert captured.err.startswith("memfit: error: ") and captured.err.count("\n") == 1


def result(**changes: Any) -> DryRunResult:
    sizes = ("peak_requested", "peak_allocated", "peak_reserved", "context", "device_total")
    fields = {f"{name}_bytes": 0 for name in (*sizes, "nvml_total", "runtime_total")}
    return DryRunResult(
        **{**fields, "gpu": "x", "torch": "x", "event_count": 0, "wall_seconds": 0.0, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"device_total_bytes": 1}, 4),
        ({"ended": "out_of_memory", "exit_code": 1}, 4),
        ({"ended": "exit", "exit_code": 3}, 1),
        ({"ended": "error", "exit_code": 1}, 1),
        ({"ended": "interrupted", "exit_code": 130}, 130),
        ({"ended": "timeout", "exit_code": 130}, 130),
    ],
)
def test_the_exit_code_says_how_it_went(changes: dict[str, Any], code: int) -> None:
    assert exit_code(result(**changes)) == code


def test_steps_are_a_number_or_all() -> None:
    assert parse_steps("all") == "all" and parse_steps("12") == 12
    for text in ("-1", "x", "1.5", ""):
        with pytest.raises(UsageError):
            parse_steps(text)


@pytest.mark.dryrun
def test_json_is_one_object_on_stdout_and_the_rest_is_on_stderr(tmp_path: Path) -> None:
    words = ("--gpu", "a100-80gb", "--json", "--repeats", "1")
    done = dryrun(*words, "--", str(SCRIPTS / "train.py"), "--save", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["schema_version"], value["engine"], value["gpu"]) == (1, "dryrun", "a100-80gb")
    assert value["fits"] is True and value["oom"] is None and value["exit_code"] == 0
    assert [read["line"] for read in value["value_reads"]] and value["steps_done"] == 3
    assert value["interval"]["repeats"] == 1 and value["confidence"] == "medium"
    assert "step 0 loss" in done.stderr and "memfit" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    scratch = Path(value["scratch_folder"])
    assert (scratch / str(tmp_path / "best.pt").lstrip("/")).is_file()


@pytest.mark.dryrun
def test_the_account_follows_what_the_script_prints(tmp_path: Path) -> None:
    done = dryrun(
        "--gpu", "2GiB,sm86", "--", "python", str(SCRIPTS / "out_of_memory.py"), "65536", folder=tmp_path
    )
    assert done.returncode == 4
    text = " ".join(done.stdout.split())
    assert "Does not fit: the GPU ran out of memory" in text and "aten.addmm asked for 4.00 GiB" in text
    assert "out_of_memory.py:15 in forward" in text and "CUDA context" in text
    assert "torch.OutOfMemoryError" in done.stderr


@pytest.mark.dryrun
def test_an_allocator_that_keeps_no_account_is_refused_in_a_line(tmp_path: Path) -> None:
    conf = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = dryrun("--gpu", "a100-80gb", "--", str(SCRIPTS / "train.py"), folder=tmp_path, env=conf)
    assert done.returncode == 6 and "leave the backend out" in done.stderr.splitlines()[-1]


@pytest.mark.dryrun
def test_a_killed_script_is_said_in_a_line(tmp_path: Path) -> None:
    done = dryrun("--gpu", "a100-80gb", "--", str(SCRIPTS / "train.py"), "--end", "kill", folder=tmp_path)
    assert done.returncode == 1
    assert "memfit: error: the script was killed by SIGKILL" in done.stderr.splitlines()[-1]


@pytest.mark.dryrun
def test_a_script_that_prints_a_gigabyte_is_not_held(tmp_path: Path) -> None:
    command = [*MEMFIT, "--gpu", "a100-80gb", "--json", "--", str(SCRIPTS / "chatter.py")]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdout is not None
        length, most_bytes = 0, 0
        while block := process.stderr.read(1 << 20):
            length += len(block)
            if length % (1 << 26) < len(block):
                most_bytes = max(most_bytes, psutil.Process(process.pid).memory_info().rss)
        assert json.loads(process.stdout.read())["exit_code"] == 0
    assert length >= 1 << 30
    assert most_bytes < 1 << 28


@pytest.mark.dryrun
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, None])
def test_an_interruption_tells_what_is_known_and_leaves_nothing(
    tmp_path: Path, how: signal.Signals | None
) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import subprocess, time, torch\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
        "stray = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('pid', stray.pid, flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    limit = ["--timeout", "15"] if how is None else []
    with subprocess.Popen(
        [*MEMFIT, "--gpu", "a100-80gb", "--json", *limit, "--", str(script)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None and process.stdout is not None
        stray = int(process.stderr.readline().split()[1])
        if how is not None:
            process.send_signal(how)
        value = json.loads(process.stdout.read())
        assert process.wait(timeout=60) == 130
    assert value["ended"] == ("timeout" if how is None else "interrupted")
    assert value["peak_requested_bytes"] == 4 << 20
    assert not _alive(stray)


@pytest.mark.dryrun
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.1)\n")
    with subprocess.Popen(
        [*MEMFIT, "--gpu", "a100-80gb", "--", str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        process.kill()
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """Whether the process is still there a little later."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        time.sleep(0.1)
    return True
