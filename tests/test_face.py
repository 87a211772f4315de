"""What users import: complete, lazy, and without torch until it is needed."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "transformers", "rich", "typer")


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize("name", memfit.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert getattr(memfit, name).__doc__
    assert name in dir(memfit)


def test_all_is_sorted_and_says_what_types_see() -> None:
    assert sorted(set(memfit.__all__)) == sorted(memfit.__all__)
    tree = ast.parse(Path(memfit.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(memfit._MODULE_OF.items())
    assert {name for name, _ in typed} == set(memfit.__all__)


def test_names_do_not_hide_parts() -> None:
    parts = {path.stem for path in Path(memfit.__file__).parent.iterdir()}
    assert not parts & set(memfit.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'memfit' has no attribute 'Plam'"):
        _ = memfit.Plam  # type: ignore[attr-defined]


def test_import_loads_nothing_else() -> None:
    code = "import sys, memfit; print(*sorted(m for m in sys.modules if m.split('.')[0] in %r))"
    assert _python(code % (("memfit", *HEAVY),)).split() == ["memfit"]


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["fit", "--help"], ["dryrun", "--help"], ["gpus", "--json"]]
)
def test_the_command_line_answers_without_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom memfit.cli import main\n"
        f"code = main({words!r})\n"
        "loaded = [name for name in ('torch', 'transformers', 'scipy') if name in sys.modules]\n"
        "sys.exit(f'code {code}, loaded {loaded}' if code or loaded else 0)"
    )
    assert "memfit" in _python(code) or words == ["gpus", "--json"]


def test_help_takes_little_processor_time() -> None:
    """Well under the time that importing torch takes, on any machine; not a matter of what else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "--help"], env=env, capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert b"dryrun" in done.stdout
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 1.0


def test_a_part_can_be_imported_by_itself() -> None:
    assert (
        _python("from memfit import Workload; print(Workload.__module__)").strip() == "memfit.core.workload"
    )
