"""Profiles on disk, in notebooks, and of scripts that the command line runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from memfit import InputError, MemoryProfiler, read_trace
from memfit.cli import main
from memfit.core.devices import find_gpu
from memfit.profiling.profile import Profile

SCRIPT = Path(__file__).with_name("train_script.py")


def test_a_saved_profile_reads_back_equal(tmp_path):
    folder = tmp_path / "new" / "profile"
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    profiler = MemoryProfiler(device="cpu", profiling_frequency=1, save_profiles=folder)
    profiler.start_profiling()
    for _ in range(2):
        model(torch.randn(8, 64)).mean().backward()
        optimizer.step()
        early = Profile.load(folder)  # written after each detailed step
    profile = profiler.stop_profiling()
    assert len(early.steps) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "profile.memfit-trace"]
    back = Profile.load(folder / "profile.json")
    assert back.to_json() == profile.to_json() and back.trace == profile.trace
    assert read_trace(folder / "profile.memfit-trace").trace == profile.trace
    assert str(back.usage) == str(profile.usage)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "not a profile that memfit saved"),
        ('{"schema": "memfit-profile", "schema_version": 99}', "this memfit reads 1"),
        ('{"schema": "memfit-profile", "schema_version": 1}', "broken profile: KeyError"),
    ],
)
def test_a_broken_profile_is_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(InputError, match=said):
        Profile.load(tmp_path)


def test_the_cell_magic(tmp_path, capsys):
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    try:
        assert shell.run_cell("%load_ext memfit").success
        cell = f"%%memfit --save {tmp_path / 'cell'}\nimport torch\nkept = torch.ones(1 << 18)"
        assert shell.run_cell(cell).success
        assert "1.00 MiB at the peak" in capsys.readouterr().out
        assert shell.user_ns["kept"].numel() == 1 << 18
        assert (
            Profile.load(tmp_path / "cell").peak_bytes
            == shell.user_ns["memfit_profile"].peak_bytes
            == 1 << 20
        )
        assert shell.run_cell("%%memfit --quiet\npass").success
        assert capsys.readouterr().out == ""
        assert not shell.run_cell("%%memfit\n1 / 0").success
        assert not shell.run_cell("%%memfit --every none\npass").success
        said = capsys.readouterr()
        assert "ZeroDivisionError" in said.out + said.err and "invalid int value" in said.err
    finally:
        shell.reset(new_session=False)
        InteractiveShell.clear_instance()


def test_a_script_that_fails_keeps_its_profile(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--every", "3", "--json", "--", "python", str(SCRIPT), "5", "--fail"]) == 1
    output = capfd.readouterr()
    said = json.loads(output.out)
    assert "ZeroDivisionError" in output.err and "memfit" not in output.err
    assert said["folder"] == "memfit-profile-train_script" and said["exit_code"] == 1
    assert [step["number"] for step in said["steps"] if step["detailed"]] == [0, 1, 3]
    assert said["peak_bytes"] == max(step["peak_bytes"] for step in said["steps"])
    assert Profile.load(said["folder"]).peak_bytes == said["peak_bytes"]


@pytest.mark.dryrun
def test_a_script_on_the_made_up_gpu(tmp_path):
    """PyTorch's own allocator is behind it: it counts what the profiler adds up, and its workspaces."""
    from memfit.dryrun.environment import gpu_environment

    words = ["-m", "memfit", "profile", "--history", "--every", "1", "--json", "-o", str(tmp_path), "--"]
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT), "4", "--cuda"],
        env=gpu_environment(find_gpu("a100-80gb")), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    last = said["steps"][3]
    workspaces = 2 * 8_519_680  # cuBLAS: one in the forward's thread, one in autograd's
    assert said["device_type"] == "cuda" and last["device"]["alloc_retries"] == 0
    assert last["device"]["requested_bytes"] == last["end_bytes"] + workspaces
    assert last["device"]["peak_requested_bytes"] == said["peak_bytes"] + workspaces
    history = read_trace(tmp_path / "allocator.pickle")
    assert history.recorded_peak_reserved_bytes == last["device"]["peak_reserved_bytes"]
