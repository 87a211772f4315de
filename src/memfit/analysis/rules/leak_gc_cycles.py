"""Rule 10: memory builds up over steps and drops at once: reference cycles wait for Python's collector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED, WARM_UP_STEPS
from memfit.analysis.rules.base import Found, Rule, site_lines
from memfit.analysis.rules.leak_monotonic import freed_with_their_step
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class LeakGcCycles(Rule):
    """Looks for a sawtooth: bytes of several steps that are freed together.

    Args:
        least_teeth: drops.
        least_height_bytes, least_height_share: of a drop, the latter of the peak.
        least_steps_in_a_drop: blocks of how many earlier steps are freed together.
    """

    number: ClassVar[int] = 10
    id: ClassVar[str] = "LEAK_GC_CYCLES"
    title: ClassVar[str] = "Memory builds up and drops at once: cycles wait for Python's collector"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "Live bytes at the ends of steps fall least_teeth times by least_height_bytes and "
        "least_height_share of the peak, because blocks of least_steps_in_a_drop earlier steps are freed "
        "within one step."
    )
    saving: ClassVar[str] = "mean height of the teeth"
    source: ClassVar[str] = "PyTorch blog, Understanding GPU Memory 2: finding and removing reference cycles"

    least_teeth: int = 1
    least_height_bytes: int = 4 * MIB
    least_height_share: float = 0.02
    least_steps_in_a_drop: int = 2

    def look(self, case: Evidence) -> Iterator[Found]:
        ends = np.array(case.step_ends, dtype=np.int64)
        if len(ends) < WARM_UP_STEPS + 3:
            return
        blocks = case.blocks
        born_in = np.searchsorted(ends, blocks.born, side="right")
        freed_in = np.searchsorted(ends, blocks.freed, side="right")
        late = (freed_in - born_in >= 1) & (blocks.freed < len(blocks.trace))
        late &= ~blocks.has("category", OWNED) & ~blocks.has("phase", ("init",))
        least = max(self.least_height_bytes, self.least_height_share * case.peak_bytes)
        teeth, mask = self._teeth(case, late, born_in, freed_in, least)
        if len(teeth) < self.least_teeth:
            return
        height = int(np.mean(teeth))
        sites = blocks.largest_sites(mask, 3)
        yield self.found(
            f"Memory builds up to {format_bytes(height)} over steps and is freed at once: reference cycles.",
            confidence="medium",
            evidence=[
                f"{len(teeth)} drops of {format_bytes(height)} on average, each of blocks from several steps",
                *(f"freed late: {line}" for line in site_lines(sites)),
            ],
            size_bytes=height,
            where=sites[0][0] if sites else None,
            advice=[
                Advice(
                    action="Break the cycle: hold the back reference weakly, or drop it at the end of the "
                    "step. memfit.collect() names the objects that hold each other.",
                    typed="print(memfit.collect())",
                    kind="python",
                    saving_bytes=height,
                    cost="none",
                    source=self.source,
                ),
                Advice(
                    action="As a stopgap, collect at a fixed place.",
                    typed="gc.collect()  # every few steps",
                    kind="python",
                    saving_bytes=height,
                    cost="tens of milliseconds a call",
                ),
            ],
            edit=freed_with_their_step(case, mask, born_in),
        )

    def _teeth(
        self,
        case: Evidence,
        late: Mask,
        born_in: np.ndarray,
        freed_in: np.ndarray,
        least: float,
    ) -> tuple[list[int], Mask]:
        """Heights of the drops, and the blocks that they are made of."""
        blocks = case.blocks
        mask = np.zeros(len(blocks), dtype=np.bool_)
        heights: list[int] = []
        for step in np.unique(freed_in[late]).tolist():
            together = late & (freed_in == step)
            # What a step keeps for the next one only (a previous output) is no cycle.
            older = together & (step - born_in >= 2)
            steps = len(np.unique(born_in[together]))
            height = int(blocks.size[together].sum())
            if height >= least and older.any() and steps >= self.least_steps_in_a_drop:
                heights.append(height)
                mask |= together
        return heights, mask
