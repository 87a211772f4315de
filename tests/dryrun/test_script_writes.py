"""A dry run leaves the user's files as they were, and the script does not notice."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from preloaded import Preloaded

pytestmark = pytest.mark.dryrun


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and ".output" not in path.parts
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    import torch

    torch.save({"old": 1}, tmp_path / "best.pt")
    (tmp_path / "log.txt").write_text("old line\n")
    (tmp_path / "gone.txt").write_text("the user's")
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "model.pt").write_bytes(b"the user's")
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    return tmp_path


def test_saving_keeps_the_users_files(preloaded: Preloaded, project: Path) -> None:
    before = state(project)
    outcome = preloaded.run("checkpoints.py", folder=project)
    assert outcome.stdout == "saved\n", outcome.stderr
    assert state(project) == before
    assert outcome.result.scratch_folder is not None
    written = {os.path.relpath(path, project) for path in outcome.written}
    assert {"best.pt", "renamed.pt", "copy.txt", "checkpoints/step-30/model.safetensors"} <= written


def test_a_best_checkpoint_every_step(preloaded: Preloaded, project: Path) -> None:
    before = state(project)
    outcome = preloaded.run("train.py", "--save", folder=project)
    assert outcome.result.ended == "steps" and state(project) == before
    assert str(project / "best.pt") in outcome.written


def test_nothing_written_leaves_no_scratch_folder(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("inference.py", folder=tmp_path)
    assert outcome.result.scratch_folder is None and not outcome.written


def test_writes_can_be_allowed(preloaded: Preloaded, project: Path) -> None:
    old = (project / "best.pt").read_bytes()
    outcome = preloaded.run("train.py", "--save", folder=project, allow_writes=True)
    assert outcome.result.scratch_folder is None
    assert (project / "best.pt").read_bytes() != old


OLD_CHECKPOINTS = (
    "dcp/.metadata", "old-dcp/.metadata", "model.pkl", "weights.npz", "weights.bin", "weights.map",
    "trainer/checkpoint-1/model.safetensors", "accelerated/checkpoints/checkpoint_0/model.safetensors",
    "accelerated/whole/model.safetensors", "lit/best.ckpt",
)  # fmt: skip


@pytest.mark.parametrize(
    "savers",
    [
        ("distributed_checkpoints", "pickles_and_arrays", "hub"),
        pytest.param(("trainer", "accelerator", "lightning"), marks=pytest.mark.slow),
    ],
    ids=["torch", "libraries"],
)
def test_libraries_that_save_and_delete_leave_old_checkpoints(
    preloaded: Preloaded, tmp_path: Path, savers: tuple[str, ...]
) -> None:
    for module in (
        ("transformers", "accelerate", "lightning") if "trainer" in savers else ("huggingface_hub",)
    ):
        pytest.importorskip(module)
    for name in OLD_CHECKPOINTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("the user's")
    before = state(tmp_path)
    outcome = preloaded.run("savers.py", *savers, folder=tmp_path, steps="all")
    assert set(savers) <= set(outcome.stdout.splitlines()), outcome.stderr
    assert state(tmp_path) == before and len(outcome.written) > 2
    assert ("hub" in savers) == any("nothing was uploaded" in note for note in outcome.result.not_modelled)


def test_other_programs_leave_the_users_files(preloaded: Preloaded, project: Path) -> None:
    """cp, mv, rm, sed and git are guarded as the script is, and so are C libraries in the script."""
    if shutil.which("git"):
        for words in (["init", "-q"], ["add", "log.txt"]):
            subprocess.run(["git", *words], cwd=project, check=True)
    before = state(project)
    outcome = preloaded.run("other_programs.py", folder=project)
    assert outcome.stdout == "all done\n", outcome.stderr
    assert state(project) == before
    written = {os.path.relpath(path, project) for path in outcome.written}
    assert {"best.pt", "moved.pt", "new/deep/new.pt", "log.txt", "archive.tar"} <= written
    assert any(note.startswith("kept: ") for note in outcome.result.not_modelled)


def test_workers_and_subprocesses(preloaded: Preloaded, tmp_path: Path) -> None:
    """Forked and spawned workers work, a subprocess is guarded too, and no process is left."""
    outcome = preloaded.run("workers.py", folder=tmp_path, steps="all")
    assert outcome.stdout.splitlines() == ["child", "fork done True", "spawn done True"], outcome.stderr
    assert (outcome.result.steps_done, outcome.result.ended) == (16, "end")
    assert not (tmp_path / "from-child.txt").exists()
    assert str(tmp_path / "from-child.txt") in outcome.written
