"""Rule 14: the optimizer's state is still to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage
from memfit.analysis.rules.optimizer_states import state_bytes_per_parameter, trainable_count
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class OptimLazy(Rule):
    """Forecasts the state that appears in the first ``step()``.

    Args:
        least_bytes: less is not reported.
    """

    number: ClassVar[int] = 14
    id: ClassVar[str] = "OPTIM_LAZY"
    title: ClassVar[str] = "The optimizer's state is still to come"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "The configuration names an optimizer with state, nothing at the peak is optimizer state, and "
        "no step "
        "was done."
    )
    saving: ClassVar[str] = "none, a forecast: adds P_t × b_o (AdamW 8 B, momentum 4 B, 8-bit 2.03 B)"
    source: ClassVar[str] = "pytorch#9439, #18643; rf-detr#1342"
    stage: ClassVar[Stage] = "forecast"

    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        per_parameter = state_bytes_per_parameter(case.configuration)
        if not per_parameter or case.by_category.get("optimizer_state") or self._stepped(case):
            return
        added = int(per_parameter * trainable_count(case))
        if added < self.least_bytes:
            return
        peak, capacity = case.peak_bytes, case.capacity_bytes
        over = peak + added - capacity if capacity is not None and peak else 0
        evidence = [
            f"{case.configuration.optimizer}: {per_parameter:g} B for each of {trainable_count(case):,} "
            f"parameters = {format_bytes(added)}",
            "no optimizer step is in what was recorded: the state is made in the first one",
        ]
        if peak:
            evidence.append(f"with the peak so far: {format_bytes(peak + added)}")
        summary = f"The first optimizer step will add {format_bytes(added)} of state."
        if over > 0:
            summary = f"{summary[:-1]}: {format_bytes(over)} more than there is."
        yield self.found(
            summary,
            severity="error" if over > 0 else "info",
            confidence="high",
            evidence=evidence,
            size_bytes=added,
            advice=[
                Advice(
                    action="Include it: measure over two whole steps, not over the first forward and "
                    "backward.",
                    typed="memfit dryrun --gpu GPU --steps 2 -- train.py",
                    kind="shell",
                    saving_bytes=0,
                    source=self.source,
                )
            ],
        )

    def _stepped(self, case: Evidence) -> bool:
        if case.dry_run is not None and case.dry_run.steps_done:
            return True
        return any(phase == "optimizer" for phase, _, _ in case.phase_runs)
