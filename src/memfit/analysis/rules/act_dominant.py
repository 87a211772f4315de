"""Rule 24: activations are most of the peak, and nothing is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.edits import Edit
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage, share
from memfit.analysis.rules.checkpointed import layers_of
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ActDominant(Rule):
    """Looks at the share of activations at the peak.

    Args:
        least_share: of the peak.
        least_bytes: less is not reported.
        recompute_share: of a step's time that computing all layers again costs.
    """

    number: ClassVar[int] = 24
    id: ClassVar[str] = "ACT_DOMINANT"
    title: ClassVar[str] = "Activations are most of the peak, and nothing is recomputed"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "Activations above least_share of the live bytes at the peak, no recomputation in the trace, and the "
        "configuration does not ask for checkpointing."
    )
    saving: ClassVar[str] = "A − (Σ outputs of the layers + activations of the largest layer)"
    source: ClassVar[str] = "Chen 2016, Training Deep Nets with Sublinear Memory Cost"
    stage: ClassVar[Stage] = "trade"

    least_share: float = 0.5
    least_bytes: int = LEAST_BYTES
    recompute_share: float = 0.3

    def look(self, case: Evidence) -> Iterator[Found]:
        activations, peak = int(case.by_category.get("activation", 0)), case.peak_bytes
        if activations < self.least_bytes or activations <= self.least_share * peak:
            return
        if case.configuration.gradient_checkpointing or not self._keeps_all(case):
            return
        layers = layers_of(case) if case.trace is not None and len(case.trace) else None
        evidence = [f"{format_bytes(activations)} of {format_bytes(peak)} at the peak are activations"]
        saving: int | None = None
        edit = Edit()
        if layers is not None:
            sizes = layers.at_peak
            largest = max(sizes.values())
            saving = max(sum(sizes.values()) - layers.kept_bytes - largest, 0)
            if saving < self.least_bytes:
                return
            edit = layers.edit
            evidence += [
                f"{len(sizes)} layers ({min(sizes)} … {max(sizes)}) save "
                f"{format_bytes(sum(sizes.values()))}, "
                f"the largest {format_bytes(largest)}",
                f"computed again, they keep their outputs: {format_bytes(layers.kept_bytes)}",
            ]
        yield self.found(
            f"Activations are {share(activations, peak)} of the peak, and all are kept.",
            severity="info",
            confidence="high",
            evidence=evidence,
            size_bytes=activations,
            advice=[
                Advice(
                    action="Compute layers again in the backward pass instead of keeping what they saved. "
                    "`memfit fit` chooses which, for a budget, at the least time.",
                    typed="model = memfit.GradientCheckpointing(checkpoint_frequency=1).apply(model)",
                    kind="python",
                    saving_bytes=saving,
                    cost=f"up to {100 * self.recompute_share:.0f} % of the step's time (one more "
                    "forward pass)",
                    risks="None for results: gradients stay bitwise the same.",
                    source=self.source,
                )
            ],
            edit=edit if edit.windows else None,
        )

    def _keeps_all(self, case: Evidence) -> bool:
        """Whether there is a backward pass, and nothing is computed again for it."""
        phases = {phase for phase, _, _ in case.phase_runs}
        return not phases or ("backward" in phases and "recompute" not in phases)
