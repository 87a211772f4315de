"""Rule 15: the optimizer works on all parameters at once, and its temporaries make the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, removed
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class OptimForeach(Rule):
    """Adds up what an optimizer step allocates and frees itself.

    Args:
        least_ratio, most_ratio: of that to the bytes of the trained parameters.
        least_bytes: less is not reported.
    """

    number: ClassVar[int] = 15
    id: ClassVar[str] = "OPTIM_FOREACH"
    title: ClassVar[str] = "The optimizer's temporaries make the peak"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "The peak is in an optimizer step, where blocks that the step itself frees hold least_ratio to "
        "most_ratio times the trained parameters' bytes (foreach, PyTorch's default on CUDA)."
    )
    saving: ClassVar[str] = "min(spike, peak − next peak)"
    source: ClassVar[str] = "pytorch#97712 (5515 → 6802 MiB), #104898; torchtune#389"
    peak_phases: ClassVar[tuple[str, ...]] = ("optimizer",)

    least_ratio: float = 0.8
    most_ratio: float = 1.3
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.peak_phase != "optimizer" or case.configuration.optimizer_foreach is False:
            return
        mask = self._temporaries(case)
        blocks = case.blocks
        spike = case.bytes_at_peak(mask)
        trained = case.trainable_bytes
        if spike < self.least_bytes or not self.least_ratio * trained <= spike <= self.most_ratio * trained:
            return
        next_peak = self._peak_elsewhere(case)
        saving = min(spike, max(case.peak_bytes - next_peak, 0))
        sites = blocks.largest_sites(mask & case.live_at_peak, 1)
        yield self.found(
            f"The optimizer's step makes {format_bytes(spike)} of temporaries, and the peak with them.",
            confidence="high",
            evidence=[
                f"temporaries of step(): {format_bytes(spike)}, {spike / trained:.2f} times the trained "
                f"parameters ({format_bytes(trained)})",
                f"the peak is {format_bytes(case.peak_bytes)}; outside of the optimizer it is "
                f"{format_bytes(next_peak)}",
            ],
            size_bytes=spike,
            where=sites[0][0] if sites else None,
            advice=[
                Advice(
                    action="Use the fused implementation: no temporaries, and the fastest.",
                    typed="optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
                    kind="python",
                    saving_bytes=saving,
                    cost="none; usually faster",
                    risks="Sums are done in another order.",
                    source=self.source,
                ),
                Advice(
                    action="Where there is no fused one, go parameter by parameter.",
                    typed="optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)",
                    kind="python",
                    saving_bytes=saving,
                    cost="a slower step(), by a few percent of a training step",
                ),
            ],
            edit=Edit(windows=removed(blocks.ids[mask].tolist())),
        )

    def _peak_elsewhere(self, case: Evidence) -> int:
        """The most live bytes outside of optimizer steps."""
        live = case.timeline.live_bytes
        spans = [live[start:end] for phase, start, end in case.phase_runs if phase != "optimizer"]
        return max((int(span.max()) for span in spans), default=0)

    def _temporaries(self, case: Evidence) -> Mask:
        """Blocks that an optimizer step makes and frees itself."""
        blocks = case.blocks
        mask = np.zeros(len(blocks), dtype=np.bool_)
        for phase, start, end in case.phase_runs:
            if phase == "optimizer":
                mask |= (blocks.born >= start) & (blocks.freed < self._until(case, end))
        return mask & blocks.has("phase", ("optimizer",)) & ~blocks.has("category", OWNED)

    def _until(self, case: Evidence, end: int) -> int:
        """Frees at the end of a step come before the next phase allocates anything."""
        return min(end + 1, len(case.blocks.trace))
