"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("allocator", "dynamic", "handles", "idle", "leaks", "pool", "served")


@pytest.mark.parametrize("name", [*(f"memfit.pools.{name}" for name in MODULES), "memfit.manager"])
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
