"""Rule 19: a checkpoint that was loaded to the GPU stays there beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, share
from memfit.analysis.rules.parameter_copies import copies_of_parameters
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ResumeDuplicate(Rule):
    """Looks for a line whose blocks have the parameters' sizes and stay until the peak.

    Args:
        least_share: of the parameters' bytes, what the copy has to have.
        least_match: of the line's bytes, what has to match parameters.
        least_bytes: less is not reported.
    """

    number: ClassVar[int] = 19
    id: ClassVar[str] = "RESUME_DUPLICATE"
    title: ClassVar[str] = "A checkpoint that was loaded to the GPU stays there beside the model"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "Blocks of one line, live at the peak and nobody's parameters by birth, have the sizes of the "
        "parameters (least_match of their bytes, least_share of the parameters'); the line, where it can be "
        "read, loads."
    )
    saving: ClassVar[str] = "Σ of those blocks"
    source: ClassVar[str] = "transformers#22123; pytorch#7415; nanoGPT#236; torch.load, map_location"

    least_share: float = 0.5
    least_match: float = 0.8
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is None or not len(case.trace):
            return
        copies = copies_of_parameters(case, least_share=self.least_share, least_match=self.least_match)
        for copy in copies:
            if copy.kind == "average" or copy.size_bytes < self.least_bytes:
                continue
            held = case.bytes_at_peak(copy.mask)
            evidence = [
                f"{format_bytes(held)} in {int(copy.mask.sum())} blocks at {copy.where}",
                f"they have the sizes of {share(copy.size_bytes, case.parameter_bytes)} of the parameters",
            ]
            evidence += [f"the line: {copy.code}"] if copy.code else []
            yield self.found(
                f"A second copy of the parameters, {format_bytes(held)}, stays on the GPU after loading.",
                confidence="high" if copy.kind == "load" else "medium",
                evidence=evidence,
                size_bytes=held,
                where=copy.where,
                advice=[
                    Advice(
                        action="Load to the host, and let go of the checkpoint once it is in the model.",
                        typed="-checkpoint = torch.load(path)\n+checkpoint = torch.load(path, "
                        'map_location="cpu", '
                        'mmap=True)\n model.load_state_dict(checkpoint["model"])\n+del checkpoint',
                        kind="diff",
                        saving_bytes=held,
                        cost="none",
                        source=self.source,
                    )
                ],
                edit=_freed_after_loading(case, copy.mask),
            )


def _freed_after_loading(case: Evidence, mask: Mask) -> Edit:
    """The copy freed when its last block has been born."""
    blocks = case.blocks
    last = int(blocks.born[mask].max()) + 1
    windows = {
        int(blocks.ids[i]): (
            Window(int(blocks.born[i]), min(last, int(blocks.freed[i])), int(blocks.size[i])),
        )
        for i in np.flatnonzero(mask).tolist()
    }
    return Edit(windows=windows)
