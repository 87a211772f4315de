"""Rule 9: autograd graphs of earlier steps are kept, with all that they saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, share
from memfit.analysis.rules.leak_monotonic import LeakSettings, freed_with_their_step
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class LeakGraphRetained(LeakSettings):
    """A leak whose blocks were saved by the forward pass of a model.

    Args:
        least_forward_share: of the growing bytes, what has to come from the forward pass.
        least_sites: a graph saves at several places; one place alone is a list of tensors (LEAK_MONOTONIC).
    """

    number: ClassVar[int] = 9
    id: ClassVar[str] = "LEAK_GRAPH_RETAINED"
    title: ClassVar[str] = "Graphs of earlier steps are kept, with all the activations that they saved"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "LEAK_MONOTONIC's growth, with at least least_forward_share of the growing bytes allocated in "
        "forward "
        "passes, at least_sites places or more, in a job that runs backward passes."
    )
    saving: ClassVar[str] = "slope × steps so far"
    source: ClassVar[str] = "pytorch#17568, #1840, #64586; PyTorch FAQ: don't accumulate history"

    least_forward_share: float = 0.5
    least_sites: int = 2

    def look(self, case: Evidence) -> Iterator[Found]:
        growth = self.leak(case)
        if growth is None or not any(phase == "backward" for phase, _, _ in case.phase_runs):
            return
        blocks = case.blocks
        total = int(blocks.size[growth.mask].sum())
        forward = growth.mask & blocks.has("phase", ("forward", "recompute"))
        from_forward = int(blocks.size[forward].sum())
        sites = blocks.largest_sites(forward, most=100)
        ops = {(blocks.text("op", i), blocks.text("module", i)) for i in forward.nonzero()[0].tolist()}
        if from_forward < self.least_forward_share * total or max(len(sites), len(ops)) < self.least_sites:
            return
        where = sites[0][0]
        yield self.found(
            f"Graphs are kept: {format_bytes(growth.slope.per_step)} a step of what forward passes saved.",
            severity=self.severity(case, growth),
            confidence="high",
            evidence=[
                *self.evidence_lines(case, growth),
                f"{share(from_forward, total)} of the growing bytes are from forward passes, by "
                f"{len(ops)} operations of modules",
            ],
            size_bytes=total,
            where=where,
            advice=[
                Advice(
                    action="Something holds a loss or an output with its graph (a running total, a list, a "
                    "meter): take the number, or detach the tensor.",
                    typed="-    total += loss\n+    total += loss.item()  # or losses.append(loss.detach())",
                    kind="diff",
                    saving_bytes=self.saving_bytes(case, growth),
                    cost=".item() waits for the GPU; .detach() does not",
                    source=self.source,
                ),
                Advice(
                    action="Find who holds it: memfit.collect() names closures, cycles and tracebacks.",
                    typed="print(memfit.collect())",
                    kind="python",
                ),
            ],
            edit=freed_with_their_step(case, growth.mask, growth.step_of),
        )
