"""What the dry run of a plan read decides how far its figures are trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from imitation import MIB, Imitation

from memfit.dryrun.result import DryRunResult, ValueRead
from memfit.planning.bench import Final
from memfit.planning.trust import judged, other_answers_note


def result(reserved_bytes: int, *reads: ValueRead) -> DryRunResult:
    peaks = {f"peak_{name}_bytes": reserved_bytes for name in ("requested", "allocated", "reserved")}
    device = {"context_bytes": 0, "nvml_total_bytes": 1 << 40, "runtime_total_bytes": 1 << 40}
    return DryRunResult(
        gpu="a100-80gb",
        torch="",
        device_total_bytes=reserved_bytes,
        event_count=0,
        wall_seconds=0.0,
        ended="steps",
        value_reads=reads,
        **peaks,
        **device,
    )


@dataclass
class Steered(Imitation):
    """An oracle whose step needs another 100 MiB with another answer."""

    answered: list[dict[str, str]] = field(default_factory=list)

    def final(
        self, techniques: Any, *, trace: str | None = None, answers: Mapping[str, str] | None = None
    ) -> Final:
        self.answered.append(dict(answers or {}))
        return replace(super().final(techniques), dry_run=result(600 * MIB))


def test_a_plan_is_measured_again_only_where_values_steer_it() -> None:
    oracle = Steered()
    read = ValueRead(
        file="m.py", line=3, function="f", op="aten.equal", answer="False", count=1, kind="boolean", site="s"
    )
    plain = Imitation().final([])
    assert judged(oracle, (), plain) is None  # not the dry run's
    quiet = judged(oracle, (), replace(plain, dry_run=result(500 * MIB, replace(read, steers="no"))))
    assert quiet is not None and quiet.confidence == "exact" and oracle.answered == []
    steered = judged(oracle, (), replace(plain, dry_run=result(500 * MIB, replace(read, steers="yes"))))
    assert steered is not None and steered.interval is not None
    assert oracle.answered == [{"s": "opposite"}]
    assert steered.interval.reserved.high_bytes == 600 * MIB and steered.confidence == "low"
    assert steered.value_reads[0].peak_change_bytes == 100 * MIB
    assert other_answers_note(steered, 600 * MIB) == ()
    assert "up to 600.00 MiB, more than the budget of 550.00 MiB" in other_answers_note(steered, 550 * MIB)[0]
