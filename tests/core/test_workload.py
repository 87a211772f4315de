"""Workloads refuse parts that cannot work, and errors carry the exit codes of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.core.errors import (
    CannotRunHere,
    InputError,
    MemfitError,
    ToolFailure,
    UsageError,
    WorkloadFailed,
)
from memfit.core.workload import PRECISIONS, Workload


def _workload(**changes: Any) -> Workload:
    parts: dict[str, Any] = {"name": "toy", "model": dict, "batch": list, "loss": lambda model, batch: 0.0}
    return Workload(**{**parts, **changes})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_known_precisions(precision: Any) -> None:
    assert _workload(precision=precision).precision == precision


def test_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'bf16' of workload 'toy': use one of fp32, bf16-autocast"):
        _workload(precision="bf16")


@pytest.mark.parametrize("part", ["model", "batch", "loss"])
def test_a_part_that_is_no_function(part: str) -> None:
    with pytest.raises(UsageError, match=f"{part} of workload 'toy' must be a function, not 7"):
        _workload(**{part: 7})


def test_exit_codes() -> None:
    codes = {
        MemfitError: 1,
        UsageError: 2,
        InputError: 5,
        CannotRunHere: 6,
        WorkloadFailed: 1,
        ToolFailure: 1,
    }
    assert {error: error.exit_code for error in codes} == codes
    assert all(issubclass(error, MemfitError) for error in codes)
