"""The examples of this part run, and so do those in the docstrings."""

from __future__ import annotations

import doctest
import importlib
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("techniques_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(
    "module",
    [
        "attention_backend",
        "blocks",
        "channels_last",
        "chunked_cross_entropy",
        "compile_warmup",
        "gradient_checkpointing",
        "optimizer_implementation",
        "partial_quantization",
        "pruning",
        "tuning",
        "vocabulary_padding",
    ],
)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"memfit.techniques.{module}"))
    assert result.attempted and not result.failed
