"""Whole programs that the repository ships: the notebook, scripts, and memfit in other people's trainers."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import COMMANDS
from memfit.cli.app import load_command
from memfit.monitor.runs import RunSource

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "memfit_tour.ipynb"
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def text_of(cell: dict[str, Any]) -> str:
    outputs = cell.get("outputs", [])
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]
    return "\n".join("".join(text) for text in texts)


def figures(text: str) -> list[str]:
    """Every size and share, without what differs from run to run: the size of the process."""
    return re.findall(r"\d+\.\d+ (?:[KMG]iB|%)", re.sub(r"(?m)^The process: .*$", "", text))


@pytest.mark.dryrun
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_shows_what_is_stored_in_it_and_the_quick_start_trains_by_its_plan(
    tmp_path: Path,
) -> None:
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    code = [(old, new) for old, new in zip(stored, notebook.cells, strict=True) if old["cell_type"] == "code"]
    assert len(code) >= 6 and all("outputs" in old and old["execution_count"] for old, _ in code)
    again = "as it is stored? jupyter execute --inplace examples/memfit_tour.ipynb"
    for old, new in code:
        assert figures(text_of(new)) == figures(text_of(old)), again
    everything = "\n".join(text_of(new) for _, new in code)
    for words in ("In [2]:", "Fits: 1.40 GiB of 12.00 GiB", "The planned step fits", "Fragmentation"):
        assert words in everything
    assert "ipykernel" not in everything
    train = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))["main"]
    assert train(str(tmp_path / "plan.json"), steps=3) == train(steps=3)


@pytest.mark.parametrize("name", ["accelerate", "lightning", "hf_trainer"])
@pytest.mark.filterwarnings("ignore")
def test_techniques_in_other_trainers_change_no_loss(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if name == "hf_trainer" else name)
    main = runpy.run_path(str(ROOT / "examples" / f"integrate_{name}.py"))["main"]
    with_techniques = main(4, folder=str(tmp_path / "with"))
    assert with_techniques == main(4, techniques=False, folder=str(tmp_path / "without"))
    assert len(set(with_techniques)) == 4
    steps = RunSource(tmp_path / "with").read(time.time()).steps
    assert [step.number for step in steps] == [1, 2, 3, 4]


def test_scripts_profile_and_analyse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = runpy.run_path(str(ROOT / "scripts" / "profile_memory.py"))["main"]
    analyze = runpy.run_path(str(ROOT / "scripts" / "analyze.py"))["main"]
    trained = str(ROOT / "tests" / "profiling" / "train_script.py")
    assert profile(["--output", str(tmp_path / "p"), "--every", "1", "--", trained, "4", "--fail"]) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert "aten.mm" in (tmp_path / "p" / "analysis.html").read_text(encoding="utf-8")
    assert analyze([str(tmp_path / "p" / "profile.memfit-trace"), "--output", str(tmp_path / "a")]) == 0
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"analysis.html", "diagnosis.html"}


@pytest.mark.parametrize(
    ("name", "words", "calls"),
    [
        ("optimize", ["hf:gpt2", "--gpu", "t4", "--allow", "reordered"], ["fit"]),
        ("optimize", ["--config", "c.yaml", "--no-verify"], ["fit"]),
        ("benchmark", ["hf:gpt2", "tv:resnet50", "--gpu", "t4", "--steps", "2"], ["ladder", "ladder"]),
        ("analyze", ["run.memfit-trace", "log.txt", "--gpu", "t4"], ["analyze", "diagnose"]),
        ("profile_memory", ["--", "train.py", "--lr", "1"], ["profile", "analyze"]),
    ],
)
def test_scripts_call_commands_as_they_are(
    name: str, words: list[str], calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a script asks for is parsed by the command itself, which is not run."""
    monkeypatch.chdir(tmp_path)
    called: list[str] = []
    seen: list[dict[str, Any]] = []

    def instead(given: list[str]) -> int:
        command, *rest = given
        called.append(command)
        seen.append(load_command(command, COMMANDS[command]).make_context(command, rest).params)
        return 0

    monkeypatch.setattr("memfit.cli.main", instead)
    (tmp_path / "run.memfit-trace").touch()
    (tmp_path / "log.txt").touch()
    (tmp_path / "c.yaml").write_text("planning: {workload: hf:gpt2, gpu: t4, memory_budget: 2GiB}")
    main = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["main"]
    assert main(words) == 0 and called == calls
    if "--config" in words:
        assert (seen[0]["workload"], seen[0]["gpu"], seen[0]["budget"]) == ("hf:gpt2", "t4", str(2 << 30))


def test_scripts_say_what_they_do() -> None:
    assert [path.stem for path in SCRIPTS] == ["analyze", "benchmark", "optimize", "profile_memory"]
    for path in SCRIPTS:
        said = subprocess.run(
            [sys.executable, str(path), "--help"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert f"python scripts/{path.name}" in said and "--output" in said
