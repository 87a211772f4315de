"""Rule 30: new sizes keep appearing, and each leaves segments that later ones cannot use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.edits import Edit
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import WARM_UP_STEPS
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class ShapeChurn(Rule):
    """Counts the sizes that each step brings anew.

    Args:
        least_steps: after the warm-up of two steps.
        least_new_share: of these steps, how many bring new sizes.
        least_spread: of the steps' peaks, (largest − smallest) / largest.
        least_block_bytes: smaller blocks are not looked at.
    """

    number: ClassVar[int] = 30
    id: ClassVar[str] = "SHAPE_CHURN"
    title: ClassVar[str] = "New sizes keep appearing from step to step"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "Of at least least_steps steps after the warm-up, least_new_share bring block sizes that were not "
        "there before, and the steps' peaks differ by least_spread."
    )
    saving: ClassVar[str] = (
        "reserved − reserved of the same events after a warm-up step with the largest batch"
    )
    source: ClassVar[str] = "PyTorch performance tuning guide; torchtune#1236; transformers#25831"
    stage: ClassVar[Stage] = "setting"

    least_steps: int = 4
    least_new_share: float = 0.5
    least_spread: float = 0.15
    least_block_bytes: int = MIB

    def look(self, case: Evidence) -> Iterator[Found]:
        ends = case.step_ends
        if len(ends) < WARM_UP_STEPS + self.least_steps:
            return
        blocks = case.blocks
        step_of = np.searchsorted(np.array(ends), blocks.born, side="right")
        seen: set[int] = set()
        new_in: list[int] = []
        large = blocks.size >= self.least_block_bytes
        for step in range(len(ends)):
            sizes = set((-(-blocks.size[large & (step_of == step)] // 512)).tolist())
            new_in.append(len(sizes - seen))
            seen |= sizes
        later = new_in[WARM_UP_STEPS:]
        bringing = sum(count > 0 for count in later)
        peaks = self._peaks(case, ends)
        spread = 1 - min(peaks[WARM_UP_STEPS:]) / max(peaks[WARM_UP_STEPS:])
        if bringing < self.least_new_share * len(later) or spread <= self.least_spread:
            return
        worst = int(np.argmax(peaks))
        span = (ends[worst - 1] if worst else 0, ends[worst])
        replay = case.replay
        held = "" if replay is None else f", {format_bytes(replay.peak_reserved_bytes)} reserved"
        yield self.found(
            f"{bringing} of {len(later)} steps bring sizes that were not there before.",
            confidence="high",
            evidence=[
                f"{len(seen)} sizes of at least {format_bytes(self.least_block_bytes)} in {len(ends)} steps",
                f"the steps' peaks differ by {share(spread, 1)}: "
                f"{format_bytes(min(peaks[WARM_UP_STEPS:]))} to "
                f"{format_bytes(max(peaks))} live{held}",
            ],
            size_bytes=None if replay is None else replay.peak_reserved_bytes - replay.peak_requested_bytes,
            advice=[
                Advice(
                    action="Run one step with the largest batch first, so that its blocks serve all others.",
                    typed="step(largest_batch)\noptimizer.zero_grad(set_to_none=True)  # and do not step",
                    kind="python",
                    cost="one step",
                    source=self.source,
                ),
                Advice(
                    action="Sort lengths into a few buckets, and pad to their ends (torch.compile: "
                    "dynamic=True, or a graph for each bucket).",
                    cost="some padding",
                ),
            ],
            edit=Edit(warm_up=span),
        )

    def _peaks(self, case: Evidence, ends: tuple[int, ...]) -> list[int]:
        live = case.timeline.live_bytes
        starts = (0, *ends)
        return [int(live[a:b].max()) if b > a else 0 for a, b in zip(starts, ends, strict=False)]
