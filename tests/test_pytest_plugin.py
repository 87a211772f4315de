"""GPU memory in other people's tests: pytest in a process of its own, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.testing import Site, assert_no_leak, sites_left

pytestmark = pytest.mark.dryrun

TESTS = """
import gc, os
import pytest, torch
from memfit.testing import GpuLeak, GpuMemoryExceeded, assert_no_leak

MIB = 1 << 20
kept = []


@pytest.fixture
def model():
    return torch.nn.Linear(1024, 1024).cuda()


@pytest.mark.limit_gpu_memory("100 MB")
def test_within(model):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()


@pytest.mark.limit_gpu_memory("20 MB", of="requested")
def test_over(model):
    model(torch.randn(8192, 1024, device="cuda")).sum().backward()  # the line


@pytest.mark.limit_gpu_memory("1 GB")
def test_out_of_memory():
    torch.empty(100 << 30, dtype=torch.uint8, device="cuda")


@pytest.mark.no_gpu_leak
def test_leaves_nothing(model):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    model.zero_grad()


@pytest.mark.no_gpu_leak
def test_leaves_something():
    kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))  # kept here


@pytest.mark.no_gpu_leak
def test_leaves_a_cycle():
    gc.disable()
    held = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")]
    held.append(held)


def test_by_hand(gpu_memory, tmp_path):
    assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB" and tmp_path.is_dir()
    with gpu_memory.limit("9 MiB"):
        torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(GpuMemoryExceeded, match="1.00 MiB over the limit of 7.00 MiB"):
        with gpu_memory.limit("7 MiB"):
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    assert gpu_memory.allocated_bytes == 0 and gpu_memory.peak_allocated_bytes == 8 * MIB


def test_steps(gpu_memory):
    lost = []
    assert_no_leak(lambda: torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    with pytest.raises(GpuLeak) as leak:
        assert_no_leak(lambda: lost.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")), steps=4)
    assert "8.00 MiB more after 4 steps, 2.00 MiB a step" in str(leak.value)
    assert "in 4 blocks at" in str(leak.value) and "test_memory.py" in str(leak.value)
    assert_no_leak(lambda: lost.append(torch.empty(MIB, device="cuda")), steps=4, tolerance="20 MiB")


@pytest.mark.limit_gpu_memory("1 GB")
def test_ends_its_process():
    os._exit(7)


@pytest.mark.skip(reason="not today")
@pytest.mark.limit_gpu_memory("1 GB")
def test_skipped():
    raise AssertionError


@pytest.mark.limit_gpu_memory("1 Gb")
def test_a_size_that_may_be_bits():
    pass


def test_plain():
    assert not torch.cuda.is_available()  # pytest's own process has no GPU
"""

PASSED = {"test_within", "test_leaves_nothing", "test_by_hand", "test_steps", "test_plain"}
FAILED = {
    "test_over", "test_out_of_memory", "test_leaves_something", "test_leaves_a_cycle",
    "test_ends_its_process",
    "test_a_size_that_may_be_bits",
}  # fmt: skip


def run_pytest(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "memfit.pytest_plugin", "-p", "no:xdist", "-rA", *words],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("others")
    (folder / "test_memory.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmemfit_gpu = a100-80gb\naddopts = --strict-markers\n")
    return run_pytest(folder, "--memfit-gpu", "a100-80gb")


def outcomes(shown: str, word: str) -> set[str]:
    return set(re.findall(rf"^{word} test_memory.py::(\w+)", shown, re.MULTILINE))


def test_each_test_has_its_outcome(shown: str) -> None:
    assert outcomes(shown, "PASSED") == PASSED, shown[-3000:]
    assert outcomes(shown, "FAILED") == FAILED
    assert "SKIPPED [1] test_memory.py" in shown and "not today" in shown


def part(shown: str, test: str) -> str:
    """What is shown of one failing test."""
    return re.split(rf"^_+ {test} _+$", shown, flags=re.MULTILINE)[1].split("\n____")[0]


def test_a_failure_shows_the_account_and_the_line(shown: str) -> None:
    text = part(shown, "test_over")
    assert "over the limit of 19.07 MiB" in text
    assert "on the made-up a100-80gb; peaks: requested" in text
    assert re.search(r"4\.00 MiB  parameter", text) and "live at the peak, by line:" in text
    assert re.search(r"40\.13 MiB +4 blocks .*test_memory.py:\d+ test_over", text)


def test_out_of_memory_is_the_tests_own_error(shown: str) -> None:
    text = part(shown, "test_out_of_memory")
    assert "torch.OutOfMemoryError" in text and "memfit/dryrun" not in text


def test_leaks_name_their_line(shown: str) -> None:
    assert "3.00 MiB of GPU memory are left after the test" in part(shown, "test_leaves_something")
    assert "test_leaves_something" in part(shown, "test_leaves_something").split("kept:")[1]
    assert "5.00 MiB" in part(shown, "test_leaves_a_cycle")
    assert "reference cycles only" in part(shown, "test_leaves_a_cycle")


def test_other_failures_say_what_they_are(shown: str) -> None:
    assert "exit code 7" in part(shown, "test_ends_its_process")
    assert "may mean bits; write GB" in part(shown, "test_a_size_that_may_be_bits")


def test_a_session_can_do_without(tmp_path: Path) -> None:
    (tmp_path / "test_memory.py").write_text(
        "import pytest\n@pytest.mark.limit_gpu_memory('1 GB')\ndef test_a(): raise AssertionError\n"
    )
    assert "1 skipped" in run_pytest(tmp_path, "--memfit-gpu=skip")
    assert "unknown GPU 'gtx1'" in run_pytest(tmp_path, "--memfit-gpu=gtx1")


def test_what_is_left_is_told_by_line() -> None:
    before = {1: (100, "a.py:1 f"), 2: (50, "a.py:2 f")}
    after = {1: (100, "a.py:1 f"), 2: (60, "a.py:9 g"), 3: (60, "a.py:9 g"), 4: (7, "")}
    assert sites_left(before, after) == [
        Site(where="a.py:9 g", size_bytes=120, count=2),
        Site(where="an unknown line", size_bytes=7, count=1),
    ]


def test_without_a_gpu_it_is_said_how_to_have_one() -> None:
    code = (
        "import json\nfrom memfit.testing import assert_no_leak\n"
        "try:\n    assert_no_leak(lambda: None)\nexcept Exception as error:\n"
        "    print(json.dumps([type(error).__name__, str(error)]))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    name, text = json.loads(done.stdout)
    assert name == "CannotRunHere" and "no_gpu_leak" in text
    with pytest.raises(Exception, match="2 or more"):
        assert_no_leak(lambda: None, steps=1)
