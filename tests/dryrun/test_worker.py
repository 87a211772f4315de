"""The worker: fresh forks and sessions, every way in which a child can end, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from memfit.core.devices import find_gpu
from memfit.core.errors import CannotRunHere, ToolFailure, UsageError, WorkloadFailed
from memfit.dryrun.worker import Worker, preload_for

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@pytest.fixture(scope="module")
def plain_worker():
    """A worker without torch: forks and messages need none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        with Worker(None, preload=()) as worker:
            yield worker


@pytest.fixture(scope="module")
def gpu_worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        with Worker(find_gpu("a100-80gb")) as worker:
            yield worker


def line_of(text):
    lines = (HERE / "worker_targets.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_soon(pid):
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_arguments_and_result_travel_as_json(plain_worker):
    arguments = {"a": [1, None, 2.5], "b": {"text": "é" * 100_000}, "c": True}
    assert plain_worker.call("worker_targets:echo", **arguments) == arguments


def test_each_call_has_a_fresh_process_that_is_reaped(plain_worker):
    pids = {plain_worker.call("worker_targets:pid") for _ in range(3)}
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.dryrun
def test_one_worker_serves_many_gpus(gpu_worker):
    for key in ("a100-80gb", "rtx3060-12gb", "h100-80gb"):
        gpu = find_gpu(key)
        name, total, capability = gpu_worker.call("worker_targets:device", gpu=gpu)
        assert (name, total, tuple(capability)) == (gpu.name, gpu.runtime_total_bytes, gpu.compute_capability)


@pytest.mark.dryrun
def test_modules_that_ask_for_the_capability_get_that_of_each_gpu(tmp_path, monkeypatch):
    (tmp_path / "asks_on_import.py").write_text(
        "import torch\n"
        "assert torch.cuda.is_available()\n"
        "SEEN = list(torch.cuda.get_device_capability()), torch.cuda.get_device_properties(0).major\n"
        "def seen():\n"
        "    return [*SEEN, list(torch.cuda.get_device_capability()), torch.cuda.is_initialized()]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker(find_gpu("a100-80gb"), preload=("torch", "asks_on_import")) as worker:
        for key in ("a100-80gb", "a100-40gb", "h100-80gb"):
            gpu = find_gpu(key)
            capability = list(gpu.compute_capability)
            seen = worker.call("asks_on_import:seen", gpu=gpu)
            assert seen == [capability, capability[0], capability, True]


@pytest.mark.dryrun
def test_out_of_memory_is_a_value(gpu_worker):
    oom = gpu_worker.call("worker_targets:out_of_memory")["oom"]
    assert oom["asked_bytes"] == 1 << 42
    assert (oom["file"], oom["line"], oom["function"]) == (
        str(HERE / "worker_targets.py"),
        line_of("1 << 42"),
        "out_of_memory",
    )


def test_what_user_code_raises_comes_with_its_line(plain_worker):
    with pytest.raises(
        WorkloadFailed,
        match=rf"ValueError: no such thing \(.*worker_targets.py:{line_of('no such thing')} in raises\)",
    ):
        plain_worker.call("worker_targets:raises")


def test_memfits_errors_keep_their_class(plain_worker):
    with pytest.raises(UsageError, match="^give another$"):
        plain_worker.call("worker_targets:raises_usage")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_killed_child_is_named_with_its_signal(plain_worker, name):
    with pytest.raises(ToolFailure, match=f"killed by {name}"):
        plain_worker.call("worker_targets:killed", name=name)


def test_a_child_that_ends_itself(plain_worker):
    with pytest.raises(WorkloadFailed, match=r"SystemExit: 3 \(.*worker_targets.py"):
        plain_worker.call("worker_targets:exits")
    with pytest.raises(WorkloadFailed, match="exit code 4"):
        plain_worker.call("worker_targets:leaves")


def test_the_worker_outlives_all_of_that(plain_worker):
    assert plain_worker.call("worker_targets:echo", x=1) == {"x": 1}


def test_a_call_that_takes_too_long_is_ended(plain_worker):
    with pytest.raises(ToolFailure, match=r"sleeps\(\) took longer than 0.2 s"):
        plain_worker.call("worker_targets:sleeps", timeout_seconds=0.2)


def test_progress_arrives_in_order(plain_worker):
    seen = []
    assert plain_worker.call("worker_targets:counts", to=3, on_progress=seen.append) == "done"
    assert seen == [0, 1, 2]


def test_prints_go_to_stderr(tmp_path):
    script = """
        from memfit.dryrun.worker import Worker
        with Worker(None, preload=()) as worker:
            worker.call("worker_targets:prints")
        print("own output")
    """
    done = _python(script)
    assert done.stdout == "own output\n"
    assert "from user code" in done.stderr and "straight to the descriptor" in done.stderr


def test_a_session_keeps_its_object_between_calls(plain_worker):
    with plain_worker.session("worker_targets:Adder", start=10) as session:
        child = session.call("pid")
        assert [session.call("add", number=1), session.call("add", number=2)] == [11, 13]
        with pytest.raises(WorkloadFailed, match="KeyError"):
            session.call("fail")
        assert plain_worker.call("worker_targets:echo") == {}, "calls go on beside a session"
        assert session.call("add", number=0) == 13
    assert gone_soon(child)


def test_a_session_that_cannot_be_built(plain_worker):
    with (
        pytest.raises(WorkloadFailed, match="cannot be made"),
        plain_worker.session("worker_targets:Unbuildable"),
    ):
        pass


def test_preload_that_is_missing():
    with (
        Worker(None, preload=("no_such_module",)) as worker,
        pytest.raises(CannotRunHere, match="no_such_module"),
    ):
        worker.call("worker_targets:pid")


def test_a_closed_worker_refuses(tmp_path):
    worker = Worker(None, preload=())
    worker.close()
    with pytest.raises(ToolFailure):
        worker.call("worker_targets:pid")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_worker_and_forks_die_with_the_parent(how):
    script = """
        import sys, time
        from memfit.dryrun.worker import Worker
        worker = Worker(None, preload=())
        with worker.session("worker_targets:Adder", start=0) as session:
            print(worker._process.pid, session.call("pid"), flush=True)
            time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=_env(), stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        process.send_signal(how)
        process.wait(10)
    assert all(map(gone_soon, pids))


def test_ctrl_c_ends_all_without_noise_from_the_children():
    script = """
        from memfit.dryrun.worker import Worker
        with Worker(None, preload=()) as worker:
            print(worker.call("worker_targets:pid"), flush=True)
            worker.call("worker_targets:sleeps")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    process.stdout.readline()
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode in (1, -signal.SIGINT)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")


def test_importing_the_parent_side_loads_no_torch():
    done = _python("import sys, memfit.dryrun.worker; print('torch' in sys.modules)")
    assert done.stdout == "False\n"


def test_preload_follows_the_workload(tmp_path, monkeypatch):
    assert "transformers" in preload_for("hf:gpt2,batch=8") and "torchvision" in preload_for("tv:resnet50")
    assert preload_for("no_such_file.py:workload") == ("torch",)
    file = tmp_path / "train.py"
    file.write_text("import torch\nfrom torchvision.models import resnet50\nif True:\n    import timm, os\n")
    assert preload_for(f"{file}:workload") == ("torch", "?torchvision", "?timm")
    monkeypatch.setitem(sys.modules, "peft", sys)
    assert "?peft" in preload_for(None)


def _env():
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)])}


def _python(script):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=_env(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
