"""Rule 8: live memory grows from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice, Severity
from memfit.analysis.growth import Growth
from memfit.analysis.rules.base import Found, Rule, share, site_lines
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class LeakSettings(Rule):
    """What growth counts as a leak.

    Args:
        least_slope_bytes: per step.
        least_slope_share: per step, of the peak.
        least_steps: after the warm-up of two steps.
        least_r_squared: how straight the growth has to be.
        least_explained: share of the growth that the blocks which outlive their step have to make up, and to
            hold until the end; less is a buffer that grows (KV_GROWTH), or shapes that do.
    """

    least_slope_bytes: int = MIB
    least_slope_share: float = 0.001
    least_steps: int = 8
    least_r_squared: float = 0.9
    least_explained: float = 0.5

    def leak(self, case: Evidence) -> Growth | None:
        """The growth, where it is one."""
        growth = case.growth
        if growth is None:
            return None
        slope = growth.slope
        least = max(self.least_slope_bytes, self.least_slope_share * case.peak_bytes)
        steady = slope.steps + 1 >= self.least_steps and slope.r_squared > self.least_r_squared
        grown = slope.per_step * slope.steps
        blocks = case.blocks
        kept = growth.mask & blocks.live_after(int(blocks.born[-1]))  # when the last block is born
        explained = int(blocks.size[kept].sum()) >= self.least_explained * grown
        return growth if slope.per_step > least and steady and explained else None

    def evidence_lines(self, case: Evidence, growth: Growth) -> list[str]:
        """The slope, where it comes from, and when memory is out."""
        slope = growth.slope
        lines = [
            f"live bytes at the ends of {slope.steps + 1} steps grow by {format_bytes(slope.per_step)} a "
            f"step (R² {slope.r_squared:.3f})",
            *(f"growing: {line}" for line in site_lines(case.blocks.largest_sites(growth.mask, 3))),
        ]
        left = self.steps_left(case, growth)
        if left is not None:
            lines.append(f"memory is full after about {left:,} more steps")
        return lines

    def steps_left(self, case: Evidence, growth: Growth) -> int | None:
        """Steps until the device's memory is full."""
        capacity = case.capacity_bytes
        if capacity is None:
            return None
        return max(int((capacity - case.peak_bytes) / growth.slope.per_step), 0)

    def severity(self, case: Evidence, growth: Growth) -> Severity:
        """An error where the job will not get to its end."""
        left, total = self.steps_left(case, growth), case.configuration.total_steps
        done = len(case.step_ends)
        return "error" if left is not None and total is not None and total - done > left else "warning"

    def saving_bytes(self, case: Evidence, growth: Growth) -> int:
        """The growth over the steps that remain, where they are known; else over those that were seen."""
        total = case.configuration.total_steps
        steps = growth.slope.steps if total is None else max(total - len(case.step_ends), growth.slope.steps)
        return int(growth.slope.per_step * steps)


def freed_with_their_step(case: Evidence, mask: Mask, step_of: np.ndarray) -> Edit:
    """The masked blocks, freed at the end of the step in which they were born."""
    ends, blocks = case.step_ends, case.blocks
    windows = {}
    for index in np.flatnonzero(mask).tolist():
        step = int(step_of[index])
        end = ends[step] if step < len(ends) else len(blocks.trace)
        until = min(max(end, int(blocks.born[index]) + 1), int(blocks.freed[index]))
        windows[int(blocks.ids[index])] = (Window(int(blocks.born[index]), until, int(blocks.size[index])),)
    return Edit(windows=windows)


@dataclass(frozen=True, kw_only=True)
class LeakMonotonic(LeakSettings):
    """Fits a line to the live bytes at the ends of steps, and names the blocks that outlive theirs."""

    number: ClassVar[int] = 8
    id: ClassVar[str] = "LEAK_MONOTONIC"
    title: ClassVar[str] = "Live memory grows from step to step"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "Theil-Sen slope of the live bytes at the ends of at least least_steps steps above least_slope_bytes "
        "and least_slope_share of the peak, R² above least_r_squared, explained by blocks that outlive the "
        "step after their own."
    )
    saving: ClassVar[str] = "slope × remaining steps; time to out of memory = (capacity − peak) / slope"
    source: ClassVar[str] = "pytorch#17568; PyTorch FAQ"

    def look(self, case: Evidence) -> Iterator[Found]:
        growth = self.leak(case)
        if growth is None:
            return
        blocks = case.blocks
        sites = blocks.largest_sites(growth.mask, 1)
        where = sites[0][0]
        total = int(blocks.size[growth.mask].sum())
        yield self.found(
            f"Memory grows by {format_bytes(growth.slope.per_step)} a step: tensors made at {where} are "
            "kept.",
            severity=self.severity(case, growth),
            confidence="high",
            evidence=[
                *self.evidence_lines(case, growth),
                f"{share(sites[0][1], total)} of it at the largest site",
            ],
            size_bytes=total,
            where=where,
            advice=[
                Advice(
                    action="Let go of what is kept there from step to step, or keep a copy on the host.",
                    typed="history.append(value.detach().cpu())",
                    kind="python",
                    saving_bytes=self.saving_bytes(case, growth),
                    cost="the copy waits for the GPU",
                    source=self.source,
                )
            ],
            edit=freed_with_their_step(case, growth.mask, growth.step_of),
        )
