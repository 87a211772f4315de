"""Rule 13: outputs of an evaluation pile up on the GPU until its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, site_lines
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class EvalAccumulation(Rule):
    """Looks for one site whose blocks pile up in forward passes without a backward pass.

    Args:
        least_batches: how many outputs have to be live at once.
        least_bytes: what they hold.
        output_bytes: of an element of the outputs, where only the configuration is known.
    """

    number: ClassVar[int] = 13
    id: ClassVar[str] = "EVAL_ACCUMULATION"
    title: ClassVar[str] = "Outputs of an evaluation pile up on the GPU until its end"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "At one site at least least_batches blocks, of forward passes that no backward pass "
        "follows, are all live when the last is born. Or, of the configuration: the Trainer evaluates with "
        "all logits, and eval_accumulation_steps is not set."
    )
    saving: ClassVar[str] = "output bytes × number of batches"
    source: ClassVar[str] = "transformers#25487; torchmetrics#1323"

    least_batches: int = 4
    least_bytes: int = LEAST_BYTES
    output_bytes: int = 4

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is not None and len(case.trace):
            yield from self._in_trace(case)
        elif case.configuration.evaluates and not case.configuration.eval_accumulation_steps:
            yield from self._of_configuration(case)

    def _in_trace(self, case: Evidence) -> Iterator[Found]:
        blocks = case.blocks
        passes = blocks.has("phase", ("forward",)) & ~blocks.has("category", OWNED)
        mask = np.zeros(len(blocks), dtype=np.bool_)
        sites = blocks.site_codes
        for phase, start, end in case.phase_runs:
            if phase == "forward":
                inside = passes & (blocks.born >= start) & (blocks.born < end)
                mask |= self._piled_up(case, inside, sites)
        total = int(blocks.size[mask].sum())
        if total < self.least_bytes:
            return
        where = blocks.largest_sites(mask, 3)
        count, largest = int(mask.sum()), int(blocks.size[mask].max())
        yield self.found(
            f"{count} outputs pile up on the GPU: {format_bytes(total)} that only the end of the "
            "evaluation frees.",
            evidence=[f"live together: {line}" for line in site_lines(where)],
            size_bytes=total,
            where=where[0][0],
            advice=[
                Advice(
                    action="Move each batch's outputs to the host, or keep a running metric instead of them.",
                    typed="-        outputs.append(model(batch))\n+        "
                    "outputs.append(model(batch).cpu())",
                    kind="diff",
                    saving_bytes=total - largest,
                    cost="a copy to the host per batch",
                    risks="The host's memory grows instead: a streaming metric does not.",
                    source=self.source,
                )
            ],
            edit=_one_at_a_time(case, mask),
        )

    def _piled_up(self, case: Evidence, inside: Mask, sites: np.ndarray) -> Mask:
        """Blocks of one site of one run, all live when the last of them is born."""
        blocks = case.blocks
        mask = np.zeros(len(blocks), dtype=np.bool_)
        groups: dict[int, list[int]] = {}
        for index in np.flatnonzero(inside).tolist():
            groups.setdefault(int(sites[index]), []).append(index)
        for members in groups.values():
            last = int(blocks.born[members[-1]])
            kept = [index for index in members if blocks.freed[index] > last]
            if len(kept) >= self.least_batches and len(kept) >= 0.9 * len(members):
                mask[kept] = True
        return mask & forward_ends(case)

    def _of_configuration(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        known = job.batch and job.sequence and job.vocabulary
        size = self.output_bytes * (job.batch or 0) * (job.sequence or 0) * (job.vocabulary or 0)
        evidence = ["the Trainer evaluates, and eval_accumulation_steps is not set"]
        if known:
            evidence.append(
                f"logits of a batch: {job.batch} × {job.sequence} × {job.vocabulary} × {self.output_bytes} B "
                f"= {format_bytes(size)}, times the batches"
            )
        yield self.found(
            "The Trainer keeps the logits of all evaluation batches on the GPU until the end.",
            severity="info" if not known else "warning",
            confidence="medium",
            evidence=evidence,
            size_bytes=size or None,
            advice=[
                Advice(
                    action="Have them moved to the host every few batches, or only compute the loss.",
                    typed="--eval_accumulation_steps 8   # or --prediction_loss_only",
                    kind="shell",
                    cost="a copy to the host per batch; the host's memory grows instead",
                    source=self.source,
                )
            ],
        )


def forward_ends(case: Evidence) -> Mask:
    """Blocks that no backward pass finds alive: freed before the next one begins, or none follows."""
    blocks = case.blocks
    starts = np.array([start for phase, start, _ in case.phase_runs if phase == "backward"], dtype=np.int64)
    starts = np.append(starts, len(blocks.trace) + 1)
    mask: Mask = blocks.freed < starts[np.searchsorted(starts, blocks.born)]
    return mask


def _one_at_a_time(case: Evidence, mask: Mask) -> Edit:
    blocks = case.blocks
    by_site: dict[int, list[int]] = {}
    for index in np.flatnonzero(mask).tolist():
        by_site.setdefault(int(blocks.site_codes[index]), []).append(index)
    windows = {}
    for members in by_site.values():
        for index, following in zip(members, members[1:], strict=False):
            window = Window(int(blocks.born[index]), int(blocks.born[following]), int(blocks.size[index]))
            windows[int(blocks.ids[index])] = (window,)
    return Edit(windows=windows)
