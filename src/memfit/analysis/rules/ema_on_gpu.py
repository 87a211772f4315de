"""Rule 31: an average of the weights lives on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.edits import Edit, removed
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage, share
from memfit.analysis.rules.parameter_copies import copies_of_parameters
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class EmaOnGpu(Rule):
    """Looks for a copy of the parameters that is made from them.

    Args:
        least_share, least_match, least_bytes: as in RESUME_DUPLICATE.
    """

    number: ClassVar[int] = 31
    id: ClassVar[str] = "EMA_ON_GPU"
    title: ClassVar[str] = "An average (or another copy) of the weights lives on the GPU"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "As RESUME_DUPLICATE, where the line copies (deepcopy, clone, an average) instead of loading."
    )
    saving: ClassVar[str] = "the copy: P × 4 B in fp32"
    source: ClassVar[str] = "timm#72; torch.optim.swa_utils.AveragedModel(device=...)"
    stage: ClassVar[Stage] = "trade"

    least_share: float = 0.5
    least_match: float = 0.8
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is None or not len(case.trace):
            return
        copies = copies_of_parameters(case, least_share=self.least_share, least_match=self.least_match)
        for copy in copies:
            if copy.kind != "average" or copy.size_bytes < self.least_bytes:
                continue
            held = case.bytes_at_peak(copy.mask)
            evidence = [
                f"{format_bytes(held)} in {int(copy.mask.sum())} blocks at {copy.where}, with the sizes of "
                f"{share(copy.size_bytes, case.parameter_bytes)} of the parameters"
            ]
            yield self.found(
                f"A copy of the weights on the GPU takes {format_bytes(held)}.",
                severity="info",
                evidence=[*evidence, *([f"the line: {copy.code}"] if copy.code else [])],
                size_bytes=held,
                where=copy.where,
                advice=[
                    Advice(
                        action="Keep the average on the host, and update it every few steps.",
                        typed='ema = torch.optim.swa_utils.AveragedModel(model, device="cpu", '
                        "use_buffers=True)",
                        kind="python",
                        saving_bytes=held,
                        cost="a copy of the parameters to the host at each update",
                        source=self.source,
                    )
                ],
                edit=Edit(windows=removed(case.blocks.ids[copy.mask].tolist())),
            )
