"""Rule 18: gradients of the last step live through the next forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, share
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class GradNotFreed(Rule):
    """Looks for gradients at a peak in the forward pass.

    Args:
        least_share: of the peak.
        least_bytes: less is not reported.
    """

    number: ClassVar[int] = 18
    id: ClassVar[str] = "GRAD_NOT_FREED"
    title: ClassVar[str] = "Gradients of the last step live through the next forward pass"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "The peak is in a forward pass, and gradients hold at least least_share of it, without gradient "
        "accumulation."
    )
    saving: ClassVar[str] = "P_t × b_g; only where the peak is in the forward pass"
    source: ClassVar[str] = "PyTorch performance tuning guide (set_to_none); torch.optim tutorial #2568"
    peak_phases: ClassVar[tuple[str, ...]] = ("forward",)

    least_share: float = 0.05
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.peak_phase != "forward" or (case.configuration.accumulation_steps or 1) > 1:
            return
        gradients = case.category_mask("gradient")
        held = case.bytes_at_peak(gradients)
        if held < max(self.least_bytes, self.least_share * case.peak_bytes):
            return
        sites = case.blocks.largest_sites(gradients & case.live_at_peak, 1)
        kept = case.configuration.set_to_none is False
        why = (
            "zero_grad(set_to_none=False) keeps them" if kept else "they are set free after the forward pass"
        )
        yield self.found(
            f"Gradients of the last step take {format_bytes(held)} at the peak, which is in the forward "
            "pass.",
            confidence="high",
            evidence=[f"{share(held, case.peak_bytes)} of the peak; {why}"],
            size_bytes=held,
            where=sites[0][0],
            advice=[
                Advice(
                    action="Let go of the gradients right after the step.",
                    typed=" optimizer.step()\n+optimizer.zero_grad(set_to_none=True)",
                    kind="diff",
                    saving_bytes=held,
                    cost="none",
                    risks="Code that reads .grad between steps sees None.",
                    source=self.source,
                )
            ],
            edit=self._edit(case, gradients),
        )

    def _edit(self, case: Evidence, gradients: np.ndarray) -> Edit:
        """Each gradient lives from a backward pass to the end of the optimizer's step only."""
        backwards = [start for phase, start, _ in case.phase_runs if phase == "backward"]
        ends = case.step_ends
        blocks, windows = case.blocks, {}
        for index in np.flatnonzero(gradients).tolist():
            born, freed, size = int(blocks.born[index]), int(blocks.freed[index]), int(blocks.size[index])
            lives = []
            start = born
            for end in (end for end in ends if born < end < freed):
                if start < end:
                    lives.append(Window(start, end, size))
                start = next((begin for begin in backwards if begin >= end), len(blocks.trace))
            if start < freed and start < len(blocks.trace):
                lives.append(Window(start, freed, size))
            windows[int(blocks.ids[index])] = tuple(lives)
        return Edit(windows=windows)
