"""Rule 22: one rank needs more than the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RankImbalance(Rule):
    """Compares the highest rank with the middle one.

    Args:
        most_share: by which the highest may exceed the median.
    """

    number: ClassVar[int] = 22
    id: ClassVar[str] = "RANK_IMBALANCE"
    title: ClassVar[str] = "One rank needs more than the others"
    needs: ClassVar[tuple[Need, ...]] = ("ranks",)
    detection: ClassVar[str] = "(max − median) / median of the ranks' peaks above most_share."
    saving: ClassVar[str] = "max − mean"
    source: ClassVar[str] = "pytorch#1893; transformers#279; Balanced-DataParallel#13"
    stage: ClassVar[Stage] = "trade"

    most_share: float = 0.10

    def look(self, case: Evidence) -> Iterator[Found]:
        peaks = [rank.peak_bytes for rank in case.ranks]
        if len(peaks) < 2:
            return
        median, highest = statistics.median(peaks), max(peaks)
        if not median or (highest - median) / median <= self.most_share:
            return
        first = max(case.ranks, key=lambda rank: rank.peak_bytes)
        saving = int(highest - statistics.mean(peaks))
        data_parallel = case.configuration.strategy == "data_parallel"
        yield self.found(
            f"{first.name} needs {format_bytes(highest)}, {share(highest - median, median)} more than "
            "the median.",
            confidence="high",
            evidence=[
                f"{rank.name}: {format_bytes(rank.peak_bytes)}"
                for rank in sorted(case.ranks, key=lambda rank: -rank.peak_bytes)[:8]
            ],
            size_bytes=saving,
            where=first.name,
            advice=[
                Advice(
                    action="Use DistributedDataParallel: DataParallel gathers outputs, loss and optimizer on "
                    "the first GPU."
                    if data_parallel
                    else "Even the ranks out: split the pipeline by bytes, or sequences by tokens; with "
                    "DataParallel, change to DistributedDataParallel.",
                    typed="torchrun --nproc_per_node=N train.py",
                    kind="shell",
                    saving_bytes=saving,
                    cost="one process per GPU",
                    source=self.source,
                )
            ],
        )
