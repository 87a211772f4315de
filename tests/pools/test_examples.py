"""The examples of the pools' page, run as users run them, and its snippets."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memfit
from memfit.allocators import ALLOCATORS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    before = dict(ALLOCATORS)
    yield
    ALLOCATORS.clear()
    ALLOCATORS.update(before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "memory_pool",
            ["32.00 MiB asked for", "3 blocks came back by themselves", "27 served from the plan"],
        ),
        ("manager_with_own_policy", ["stack"]),
        ("find_kept_tensors", ["activations[0] of RuntimeError", "\n0 bytes kept after clear_frames"]),
    ],
)
def test_an_example(name: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert all(words in output for words in said), output


def test_the_snippets_of_the_page() -> None:
    page = (ROOT / "docs" / "pools.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 5

    def step() -> None:
        names["pool"].empty((64, 64)).fill_(1.0)

    names: dict[str, object] = {
        "memfit": memfit,
        "torch": torch,
        "step": step,
        "batches": range(3),
        "requests": range(3),
        "serve": lambda batch: None,
        "print": lambda *words: None,
    }
    for snippet in snippets:
        exec(snippet.replace('"1GiB"', '"8MiB"').replace('"256MiB"', '"4MiB"'), names)
    release = names["release"]
    assert isinstance(release, memfit.IdleCacheRelease)
    release.stop()
    assert (names["served"].served, names["served"].refused) == (3, 0)  # type: ignore[attr-defined]
