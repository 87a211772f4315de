"""Rule 23: the logits of a large vocabulary, their copy in fp32 and their gradient make the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need, source_line
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage, share, site_lines
from memfit.core.units import format_bytes

LOSS_OPS = ("log_softmax", "nll_loss", "cross_entropy", "logsumexp")
LOSS_WORDS = ("cross_entropy", "log_softmax", "logits", "lm_head", "nll_loss")
OUTPUT_MODULES = ("lm_head", "output_layer", "output_projection", "head", "classifier", "crossentropyloss")


@dataclass(frozen=True, kw_only=True)
class LogitsSpike(Rule):
    """Collects the blocks of the logits' size that are live at the peak.

    Args:
        least_share: of the peak.
        least_bytes: less is not reported.
        chunks: in how many pieces the advice cuts the tokens.
        least_blocks: logits alone are no spike: a copy or a gradient has to be there.
    """

    number: ClassVar[int] = 23
    id: ClassVar[str] = "LOGITS_SPIKE"
    title: ClassVar[str] = "Logits, their copy in fp32 and their gradient make the peak"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "At least least_blocks blocks of B·S·V × {1, 2, 4} bytes of one loss (by operation, module, line, or "
        "the configuration's sizes) are live at the peak, with least_share of it or more."
    )
    saving: ClassVar[str] = "B·S·V·k − chunk·V·k, k = 11 to 12 B an element in bf16 training"
    source: ClassVar[str] = "trl#6858 (47.55 GB / 4.07e9 elements = 11.7 B); trl#5575; Liger-Kernel#241"
    stage: ClassVar[Stage] = "trade"

    least_share: float = 0.2
    least_bytes: int = LEAST_BYTES
    chunks: int = 8
    least_blocks: int = 2

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is None or not len(case.trace):
            return
        blocks = case.blocks
        unit = self._unit(case)
        if not unit:
            return
        sized = np.isin(blocks.size, [unit // 2, unit, 2 * unit, unit // 4, 4 * unit])
        mask = sized & ~blocks.has("category", OWNED) & self._related(case)
        held = case.bytes_at_peak(mask)
        count = int((mask & case.live_at_peak).sum())
        if held < max(self.least_bytes, self.least_share * case.peak_bytes) or count < self.least_blocks:
            return
        sites = blocks.largest_sites(mask & case.live_at_peak, 4)
        saving = held - held // self.chunks
        job = case.configuration
        lines = [
            f"{share(held, case.peak_bytes)} of the peak: {count} blocks of logits' size",
            *site_lines(sites),
        ]
        if job.vocabulary:
            elements = unit // 4
            lines.append(
                f"{elements // job.vocabulary:,} tokens × {job.vocabulary:,} words: {held / elements:.1f} B "
                "for each element"
            )
        yield self.found(
            f"Logits and what is computed from them take {format_bytes(held)} at the peak.",
            severity="info" if held < case.peak_bytes // 2 else "warning",
            confidence="high",
            evidence=lines,
            size_bytes=held,
            where=sites[0][0],
            advice=[
                Advice(
                    action="Compute the output layer and the loss chunk by chunk over the tokens.",
                    typed=f"model = memfit.ChunkedCrossEntropy(chunks={self.chunks}).apply(model)",
                    kind="python",
                    saving_bytes=saving,
                    cost="none to a few percent: smaller products",
                    risks="Sums are done in another order.",
                    source=self.source,
                ),
                Advice(
                    action="Drop positions without a label before the output layer (logits_to_keep, "
                    "packing).",
                    cost="none",
                ),
            ],
            edit=self._edit(case, mask),
        )

    def _unit(self, case: Evidence) -> int:
        """Bytes of the logits in fp32: of the softmax of the loss, or by the configuration's sizes."""
        blocks, job = case.blocks, case.configuration
        if job.batch and job.sequence and job.vocabulary:
            unit = 4 * job.batch * job.sequence * job.vocabulary
            if np.isin(blocks.size, [unit, unit // 2]).any():
                return unit
        loss = case.live_at_peak & (blocks.containing("op", LOSS_OPS) | self._by_line(case))
        loss &= ~blocks.has("category", OWNED)
        return int(blocks.size[loss].max()) if loss.any() else 0

    def _by_line(self, case: Evidence) -> Mask:
        """Blocks whose line of code is about logits or a loss; for recordings without operations."""
        blocks = case.blocks
        codes = blocks.codes("where")
        wanted = [
            int(code)
            for code in np.unique(codes[case.live_at_peak])
            if any(word in self._text(blocks.trace.strings[int(code)]) for word in LOSS_WORDS)
        ]
        mask: Mask = np.isin(codes, wanted)
        return mask

    def _text(self, where: str) -> str:
        return f"{source_line(where)} {where.rpartition(' ')[2]}".lower()

    def _related(self, case: Evidence) -> Mask:
        """Blocks of the loss, of the output layer, or of lines about them: not every block of that size."""
        blocks = case.blocks
        mask = blocks.containing("op", LOSS_OPS) | blocks.containing("module", OUTPUT_MODULES)
        mask |= self._by_line(case) | blocks.containing("where", ("loss", "logits", "lm_head"))
        # Copies in fp32 have no module of their own where the loss is a plain function.
        casts = blocks.containing("op", ("_to_copy", "copy_", "clone", "add", "div", "mul"))
        without_module = blocks.has("module", ("",))
        plain: Mask = mask | (casts & without_module)
        return plain

    def _edit(self, case: Evidence, mask: Mask) -> Edit:
        blocks = case.blocks
        return Edit(
            windows={
                int(blocks.ids[i]): (
                    Window(int(blocks.born[i]), int(blocks.freed[i]), int(blocks.size[i]) // self.chunks),
                )
                for i in np.flatnonzero(mask).tolist()
            }
        )
