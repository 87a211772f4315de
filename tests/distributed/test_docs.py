"""The tutorial's blocks, run one after another as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from memfit.distributed.checkpoint_folder import newest_first

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == ["25", "['training goes on after step 25']"] + ["() (0.5, 0.5, 0.5)"] * 2
    assert printed[4].startswith("memory_aware: slowest 4 s") and "(optimal)" in printed[4]
    assert printed[5] == "(0, 0, 1, 1, 1, 2)"
    sums = [float(text) for text in printed[6].strip("[]").split(",")]
    assert sum(sums) == torch.ones(1000, 64).sum()
    assert len(newest_first(tmp_path / "checkpoints")) == 2
