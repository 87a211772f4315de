"""Rule 27: a convolution's workspace is far larger than its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need, source_line
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class CudnnWorkspace(Rule):
    """Looks for short-lived large blocks of convolutions.

    Args:
        least_bytes: of the workspace.
        least_ratio: to the data of the same operation.
        most_events: that it lives, at most.
        bound_share: of it, what the second-best algorithm saves at least in trials.
    """

    number: ClassVar[int] = 27
    id: ClassVar[str] = "CUDNN_WORKSPACE"
    title: ClassVar[str] = "A convolution's workspace is far larger than its data"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "A block of a convolution that lives most_events events at most, of at least least_bytes and "
        "more than "
        "least_ratio times the other blocks of that operation nearby."
    )
    saving: ClassVar[str] = "block × bound_share, until a trial with another algorithm says it exactly"
    source: ClassVar[str] = "pytorch#14614 (1.1 → 19.9 GB), #26950, #49207"
    stage: ClassVar[Stage] = "trade"

    least_bytes: int = 256 * MIB
    least_ratio: float = 4.0
    most_events: int = 4
    bound_share: float = 0.8

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is None or not len(case.trace):
            return
        blocks = case.blocks
        short = (blocks.freed - blocks.born <= self.most_events) & (blocks.size > self.least_bytes)
        windows: dict[int, tuple[Window, ...]] = {}
        largest, size = -1, 0
        for index in np.flatnonzero(short & self._convolutions(case)).tolist():
            data = self._data_bytes(case, index)
            if data and blocks.size[index] <= self.least_ratio * data:
                continue
            left = int((1 - self.bound_share) * blocks.size[index])
            window = Window(int(blocks.born[index]), int(blocks.freed[index]), left)
            windows[int(blocks.ids[index])] = (window,)
            if blocks.size[index] > size:
                largest, size = index, int(blocks.size[index])
        if largest < 0:
            return
        data = self._data_bytes(case, largest)
        times = f"{size / data:.1f} times the operation's data" if data else "of data that is not recorded"
        yield self.found(
            f"A convolution takes {format_bytes(size)} of workspace.",
            evidence=[
                f"{len(windows)} such blocks; the largest is {times} ({share(size, case.peak_bytes)} of "
                "the peak)"
            ],
            size_bytes=size,
            where=blocks.site(largest),
            advice=[
                Advice(
                    action="Let cuDNN try its algorithms, or take the one that needs least.",
                    typed="torch.backends.cudnn.benchmark = True      # or\n"
                    "torch.backends.cudnn.deterministic = True  # algorithms with little workspace",
                    kind="python",
                    saving_bytes=int(self.bound_share * size),
                    cost="deterministic algorithms can be slower; measure both",
                    risks="benchmark=True may choose a larger workspace, too.",
                    source=self.source,
                ),
                Advice(
                    action="channels_last changes which algorithms there are.",
                    typed="model = model.to(memory_format=torch.channels_last)",
                    kind="python",
                ),
            ],
            edit=Edit(windows=windows),
        )

    def _convolutions(self, case: Evidence) -> np.ndarray:
        blocks = case.blocks
        mask = blocks.containing("op", ("conv", "cudnn"))
        if mask.any():
            return mask
        codes = blocks.codes("where")
        large = np.unique(codes[blocks.size > self.least_bytes])
        wanted = [
            int(code)
            for code in large
            if "conv" in f"{source_line(blocks.trace.strings[code])} {blocks.trace.strings[code]}".lower()
        ]
        return np.isin(codes, wanted)

    def _data_bytes(self, case: Evidence, index: int) -> int:
        """Of the blocks around it of the same site: the operation's output."""
        blocks = case.blocks
        near = slice(max(index - 2, 0), index + 3)
        same = blocks.site_codes[near] == blocks.site_codes[index]
        sizes = blocks.size[near][same & (np.arange(len(blocks))[near] != index)]
        longer = blocks.freed[near] - blocks.born[near] > self.most_events
        kept = blocks.size[near][same & longer]
        return int(kept.max()) if len(kept) else int(sizes.max()) if len(sizes) else 0
