"""Rule 28: freed blocks wait for another stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.trace import Action
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class StreamDelayedFree(Rule):
    """Looks at blocks that are freed and may not be used again yet.

    Args:
        least_share: of the active bytes that wait.
        least_bytes: the same in bytes.
    """

    number: ClassVar[int] = 28
    id: ClassVar[str] = "STREAM_DELAYED_FREE"
    title: ClassVar[str] = "Freed blocks wait for another stream"
    needs: ClassVar[tuple[Need, ...]] = ("snapshot", "statistics", "trace")
    detection: ClassVar[str] = (
        "Blocks awaiting their free (snapshot, or active − allocated bytes of memory_stats), or bytes whose "
        "use on another stream was recorded, above least_share of the active bytes and least_bytes."
    )
    saving: ClassVar[str] = "peak(active) − peak(live)"
    source: ClassVar[str] = "pytorch#147168, #124260; torchtitan#735"
    stage: ClassVar[Stage] = "setting"

    least_share: float = 0.05
    least_bytes: int = 256 * MIB

    def look(self, case: Evidence) -> Iterator[Found]:
        waiting, active, what = self._figures(case)
        if waiting < self.least_bytes or waiting <= self.least_share * active:
            return
        fsdp = case.configuration.strategy == "fsdp"
        yield self.found(
            f"{format_bytes(waiting)} are freed and wait for another stream.",
            confidence="high" if what != "recorded uses on other streams" else "low",
            evidence=[f"{what}: {share(waiting, active)} of {format_bytes(active)} that cannot be given out"],
            size_bytes=waiting,
            advice=[
                Advice(
                    action="Have collectives keep their tensors instead of recording their stream.",
                    typed="export TORCH_NCCL_AVOID_RECORD_STREAMS=1",
                    kind="shell",
                    saving_bytes=waiting,
                    cost="none",
                    risks="The default in newer versions of PyTorch. "
                    + ("Under FSDP limit_all_gathers acts on the same bytes." if fsdp else ""),
                    source=self.source,
                ),
                Advice(
                    action="Allocate on the stream that uses the tensor, and prefetch fewer batches.",
                    typed="with torch.cuda.stream(consumer):\n    batch = batch.cuda(non_blocking=True)",
                    kind="python",
                ),
            ],
        )

    def _figures(self, case: Evidence) -> tuple[int, int, str]:
        """Waiting and active bytes, and where that is from."""
        if case.snapshot is not None and case.snapshot.segments:
            active = sum(segment.active_bytes for segment in case.snapshot.segments)
            return active - case.snapshot.allocated_bytes, active, "awaiting free in the snapshot"
        if case.statistics:
            last = case.statistics[-1]
            active = int(last.get("active_bytes.all.peak", 0))
            return active - int(last.get("allocated_bytes.all.peak", active)), active, "peaks of memory_stats"
        if case.trace is None or not len(case.trace):
            return 0, 0, ""
        used = np.unique(case.trace.block[case.trace.action == Action.RECORD_STREAM])
        mask = np.isin(case.blocks.ids, used)
        return case.bytes_at_peak(mask), case.peak_bytes, "recorded uses on other streams"
