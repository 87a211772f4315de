"""However a script ends, its run ends cleanly, with a result, and with the script's own words shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded

from memfit.core.errors import ToolFailure
from memfit.dryrun import launcher

pytestmark = pytest.mark.dryrun


def test_it_stops_after_the_asked_steps(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("train.py", folder=tmp_path, steps=4)
    assert (outcome.result.ended, outcome.result.steps_done, outcome.result.exit_code) == ("steps", 4, 0)
    assert outcome.stdout.count("step") == 3  # the fourth ends before the script prints it
    assert len(outcome.result.step_peaks) == 4


def test_all_steps_run_to_the_end(preloaded: Preloaded, tmp_path: Path) -> None:
    result = preloaded.run("train.py", "--steps", "6", folder=tmp_path, steps="all").result
    assert (result.ended, result.steps_done) == ("end", 6)


def test_a_script_without_steps_runs_to_its_end(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("inference.py", folder=tmp_path)
    assert (outcome.result.ended, outcome.result.steps_done) == ("end", 0)
    assert outcome.stdout == "done (16, 1024)\n"


def test_a_failure_is_shown_as_python_shows_it(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("train.py", "--end", "raise", folder=tmp_path)
    assert (outcome.result.ended, outcome.result.exit_code) == ("error", 1)
    assert outcome.result.error is not None and outcome.result.error.type == "ValueError"
    assert outcome.result.error.file is not None and outcome.result.error.file.endswith("train.py")
    lines = outcome.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the script's own mistake"
    assert "memfit" not in outcome.stderr.replace(str(tmp_path), "").replace("scripts", "").replace(
        "memfit/tests", ""
    )


def test_an_error_inside_an_operation_shows_no_frame_of_memfit(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "shapes.py"
    script.write_text("import torch\na = torch.ones(2, 3, device='cuda')\na @ a\n")
    outcome = preloaded.run(script, folder=tmp_path)
    assert outcome.stderr.count('File "') == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in outcome.stderr
    assert outcome.result.error is not None and outcome.result.error.line == 3


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("os-exit", 4)])
def test_the_scripts_exit_code_is_in_the_result(
    preloaded: Preloaded, tmp_path: Path, end: str, code: int
) -> None:
    result = preloaded.run("train.py", "--end", end, folder=tmp_path).result
    assert (result.ended, result.exit_code, result.error) == ("exit", code, None)
    assert result.peak_requested_bytes > 0


@pytest.mark.parametrize(
    "ends", ["ctypes.CDLL(None).exit(7)", "ctypes.PyDLL(None)._exit(7)", "posix._exit(7)"]
)
def test_an_end_past_python_leaves_the_result(preloaded: Preloaded, tmp_path: Path, ends: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import ctypes, os, posix, torch\n"
        "x = torch.empty(1 << 20, device='cuda')\n"
        "if os.fork() == 0:\n    ctypes.CDLL(None).exit(3)\n"  # another process, which has no result
        f"print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n{ends}\n"
    )
    outcome = preloaded.run(script, folder=tmp_path)
    assert outcome.stdout == "3\n", outcome.stderr
    assert (outcome.result.ended, outcome.result.exit_code) == ("exit", 7)
    assert outcome.result.peak_requested_bytes == 4 << 20


@pytest.mark.slow
def test_a_script_that_replaces_itself_is_followed(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import os, sys\n"
        "if 'AGAIN' not in os.environ:\n"
        "    os.environ['AGAIN'] = 'yes'\n"
        "    os.execvp('python', ['python', *sys.argv])\n"
        "import torch\n"
        "x = torch.empty(1 << 20, device='cuda')\n"
        "print(sys.argv[1], flush=True)\n"
        "os.execlp('echo', 'echo', 'other')\n"
    )
    outcome = preloaded.run(script, "argument", folder=tmp_path)
    assert outcome.stdout == "argument\nother\n", outcome.stderr
    assert outcome.result.peak_requested_bytes == 4 << 20
    assert any("replaced itself by echo" in note for note in outcome.result.not_modelled)


def test_ending_right_after_backward_is_clean_every_time(preloaded: Preloaded, tmp_path: Path) -> None:
    for _ in range(20):
        outcome = preloaded.run("train.py", "--end", "after-backward", folder=tmp_path)
        assert (outcome.result.ended, outcome.result.exit_code, outcome.stderr) == ("end", 0, "")


def test_a_script_that_does_not_hear_is_killed_and_the_reason_told(
    preloaded: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    script = tmp_path / "deaf.py"
    script.write_text("import re\nre.match('(a+)+$', 40 * 'a' + 'b')  # lets no other thread run\n")
    with pytest.raises(ToolFailure, match=r"did not end within 0.5 s of being told to \(timeout\)"):
        preloaded.run(script, folder=tmp_path, timeout_seconds=1.0)


def test_several_optimizers_end_with_the_busiest(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("several_optimizers.py", "in-turns", folder=tmp_path, steps=4)
    assert outcome.stdout.split() == ["often", "often", "seldom", "often", "often", "seldom"]


def test_an_optimizer_per_parameter_ends_after_whole_steps(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("several_optimizers.py", "in-backward", folder=tmp_path, steps=2)
    assert outcome.stdout.split() == ["backward", "backward"]
    assert outcome.result.steps_done == 2


def test_compiled_code_runs(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("compiled.py", "aot_eager", folder=tmp_path)
    assert (outcome.result.steps_done, outcome.stderr) == (3, "")


def test_one_rank_of_torchrun_runs(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run_words(["torchrun", "--nproc-per-node=1", "distributed.py"], folder=tmp_path)
    assert outcome.result.ended == "steps", outcome.stderr
    assert any("NCCL" in note for note in outcome.result.not_modelled)


def test_symmetric_memory_is_refused_in_a_line(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "symmetric.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import torch.distributed._symmetric_memory as symmetric\n"
        "dist.init_process_group('nccl')\n"
        "x = symmetric.empty(4096, device='cuda')\n"
        "symmetric.rendezvous(x, dist.group.WORLD)\n"
    )
    outcome = preloaded.run_words(["torchrun", str(script)], folder=tmp_path)
    assert outcome.stderr.splitlines()[-1].endswith("turn it off to learn of all else")
    assert outcome.result.error is not None and outcome.result.error.line == 5
    assert any(note.startswith("symmetric memory:") for note in outcome.result.not_modelled)
