"""The Python of the pages on profiling and analysis runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.analysis.analyses import ANALYSES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    before = dict(ANALYSES)
    yield
    ANALYSES.clear()
    ANALYSES.update(before)


@pytest.mark.parametrize(
    ("page", "count", "said"),
    [
        ("profiling", 3, ["CPU memory of tensors", "By category, at the peak"]),
        ("analysis", 3, ["4194304 {'parameter': 3145728", "compute 70 %"]),
    ],
)
def test_snippets(page, count, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(
        r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL
    )
    snippets = [snippet for snippet in snippets if not snippet.startswith("--8<--")]
    assert len(snippets) == count
    names: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, f"{page}.md", "exec"), names)
    output = capsys.readouterr().out
    assert all(words in output for words in said), output
