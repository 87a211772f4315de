"""Why one run needs more than another, and limits for CI."""

from __future__ import annotations

import pytest

from memfit.analysis.difference import allowed_bytes, compare
from memfit.analysis.peaks import LimitCheck, peaks_of
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.trace import TraceBuilder

from .cases import LAYERS, MIB, Job, out_of_memory
from .test_diagnosis import _dry_run


def recording(activation_bytes: int, line: int = 7) -> Recording:
    job = Job()
    for _ in range(2):
        place = f"/a/m.py:{line} forward"
        activations = [
            [job.take(activation_bytes, "activation", "forward", module=f"h.{n}.mlp", where=place)]
            for n in range(LAYERS)
        ]
        job.free(*job.backward(activations))
        job.end()
    return Recording(trace=job.builder.build())


def test_the_difference_is_told_by_category_module_and_line() -> None:
    difference = compare(recording(12 * MIB), recording(22 * MIB))
    grown = LAYERS * 10 * MIB
    assert difference.delta_bytes("requested") == grown
    assert {aspect: changes[0].text for aspect, changes in difference.changes.items()} == {
        "category": "activation", "phase": "forward", "module": "h.*.mlp", "op": "",
        "where": "m.py:7 forward",
    }  # fmt: skip
    assert all(changes[0].delta_bytes >= grown for changes in difference.changes.values())
    assert "higher" in difference.sentences()[0]
    assert difference.to_json()["delta"]["requested_bytes"] == grown


def test_lines_that_moved_are_one_function() -> None:
    difference = compare(recording(2 * MIB, line=7), recording(2 * MIB, line=19))
    assert difference.changes["where"] == () and difference.delta_bytes("requested") == 0


def test_two_dry_runs_are_compared_by_what_they_know() -> None:
    before, after = (_dry_run(peak_by_category={"activation": size * MIB}) for size in (10, 25))
    difference = compare(before, after)
    assert list(difference.changes) == ["category", "phase"]
    assert difference.changes["category"][0].delta_bytes == 15 * MIB
    assert difference.exceeds("100%", "reserved") and not difference.exceeds("200%", "reserved")
    assert difference.exceeds("10MiB", "device" if after.device_total_bytes else "reserved")


@pytest.mark.parametrize("limit", ["much", "x%", "-1%", "10"])
def test_a_limit_is_a_share_or_a_size(limit: str) -> None:
    with pytest.raises(UsageError, match="--fail-over"):
        allowed_bytes(limit, 1000)


def test_a_limit_is_kept_or_not() -> None:
    builder = TraceBuilder()
    builder.alloc(50 * MIB)
    peaks = peaks_of(Recording(trace=builder.build()))
    assert peaks.reserved_bytes == 50 * MIB == peaks.requested_bytes
    assert LimitCheck(name="a", of="reserved", limit_bytes=50 * MIB, peaks=peaks).ok
    assert not LimitCheck(name="a", of="reserved", limit_bytes=49 * MIB, peaks=peaks).ok
    with pytest.raises(UsageError, match="tells requested, allocated, reserved"):
        peaks.figure("device")
    out_of_memory(builder, MIB)
    failed = peaks_of(Recording(trace=builder.build(), total_bytes=60 * MIB))
    assert not LimitCheck(name="a", of="reserved", limit_bytes=1 << 40, peaks=failed).ok
