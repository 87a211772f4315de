"""The result as a value and as JSON."""

from __future__ import annotations

import json

import pytest

from memfit.core.errors import InputError
from memfit.dryrun.result import DryRunResult, OutOfMemory, ScriptError, ValueRead

KEYS = """schema_version engine gpu torch peak_requested_bytes peak_allocated_bytes peak_reserved_bytes
device_total_bytes nvml_total_bytes runtime_total_bytes fits oom event_count value_reads not_modelled
wall_seconds exit_code""".split()

SHORTAGE = OutOfMemory(
    file="train.py", line=12, function="main", op="aten.mm", module="layers.0", phase="forward",
    asked_bytes=5 << 30, free_bytes=1 << 30, reserved_bytes=3 << 30, caught=False, message="CUDA out of …",
)  # fmt: skip


def result(**changes: object) -> DryRunResult:
    fields: dict[str, object] = {
        "gpu": "a100-80gb", "torch": "2.14.1", "peak_requested_bytes": 10, "peak_allocated_bytes": 512,
        "peak_reserved_bytes": 2 << 20, "context_bytes": 400 << 20, "device_total_bytes": 402 << 20,
        "nvml_total_bytes": 80 << 30, "runtime_total_bytes": 79 << 30, "event_count": 2, "wall_seconds": 1.5,
    }  # fmt: skip
    return DryRunResult(**{**fields, **changes})  # type: ignore[arg-type]


def test_json_has_the_promised_keys_and_comes_back() -> None:
    read = ValueRead(file="a.py", line=1, function="f", op="aten.nonzero", answer="size 0", count=3)
    value = result(
        oom=SHORTAGE, value_reads=(read,), not_modelled=("x",), peak_by_category={"other": 10},
        error=ScriptError(type="ValueError", message="no"), step_peaks=(1, 2),
    )  # fmt: skip
    text = json.dumps(value.to_json())
    assert set(KEYS) <= set(json.loads(text))
    assert DryRunResult.from_json(json.loads(text)) == value


def test_fits_is_no_shortage_and_within_what_the_gpu_has() -> None:
    assert result().fits
    assert not result(oom=SHORTAGE).fits
    assert not result(device_total_bytes=(80 << 30) + 1).fits
    assert SHORTAGE.where == "train.py:12 in main"


def test_libraries_are_what_the_allocator_does_not_explain() -> None:
    assert result().libraries_bytes == 0
    assert result(device_total_bytes=405 << 20).libraries_bytes == 3 << 20


@pytest.mark.parametrize("broken", [{}, {"schema_version": 99}, {"schema_version": 1, "gpu": "x"}])
def test_what_is_no_result_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(InputError):
        DryRunResult.from_json(broken)
