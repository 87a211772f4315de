"""Rule 7: ``empty_cache()`` in the loop: segments go back and are taken again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage
from memfit.core.trace import Action, Trace
from memfit.core.units import format_bytes


class _Burst(NamedTuple):
    start: int
    end: int
    size_bytes: int
    again_bytes: int
    reserved_before: int


@dataclass(frozen=True, kw_only=True)
class EmptyCacheAbuse(Rule):
    """Looks for bursts of freed segments after which segments of the same sizes are taken again.

    Args:
        least_bursts: fewer are not reported.
        least_again_share: of the bytes given back, what is taken again before the next burst.
        most_full_share: a burst above this share of the device's memory is the allocator's own flush.
    """

    number: ClassVar[int] = 7
    id: ClassVar[str] = "EMPTY_CACHE_ABUSE"
    title: ClassVar[str] = "empty_cache() in the loop: memory goes back and is taken again"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "least_bursts bursts of segment frees (or calls of empty_cache), not at the device's limit and not "
        "after an out of memory, with least_again_share of the bytes taken again at the same sizes."
    )
    saving: ClassVar[str] = "time: the cudaFree and cudaMalloc of each burst; 0 bytes"
    source: ClassVar[str] = "pytorch#3518; FastVideo#606; gaussian-splatting#85"
    stage: ClassVar[Stage] = "mistake"

    least_bursts: int = 3
    least_again_share: float = 0.5
    most_full_share: float = 0.95

    def look(self, case: Evidence) -> Iterator[Found]:
        trace = case.trace
        if trace is None:
            return
        calls = int((trace.action == Action.EMPTY_CACHE).sum())
        bursts = [burst for burst in self._bursts(case, trace) if self._counts(burst, case)]
        if len(bursts) < self.least_bursts and calls < self.least_bursts:
            return
        back = sum(burst.size_bytes for burst in bursts)
        again = sum(burst.again_bytes for burst in bursts)
        where = next(
            (trace.strings[trace.where[b.start]] for b in bursts if trace.strings[trace.where[b.start]]), None
        )
        count = max(len(bursts), calls)
        yield self.found(
            f"The cache is emptied {count} times, and {format_bytes(again)} are taken again.",
            severity="warning",
            confidence="high" if calls else "medium",
            evidence=[
                f"{len(bursts)} bursts give {format_bytes(back)} back, {format_bytes(again)} of it in sizes "
                "that are asked for again right after",
                f"{calls} calls of empty_cache() are recorded"
                if calls
                else "none of them at a limit of memory",
            ],
            where=where,
            advice=[
                Advice(
                    action="Delete torch.cuda.empty_cache() from the loop: PyTorch uses its cache again by "
                    "itself, and the call makes no room for PyTorch.",
                    typed="-        torch.cuda.empty_cache()",
                    kind="diff",
                    saving_bytes=0,
                    cost="none; each call saved is a cudaFree and a cudaMalloc, and a wait for the GPU",
                    source=self.source,
                )
            ],
        )

    def _counts(self, burst: _Burst, case: Evidence) -> bool:
        capacity = case.capacity_bytes
        at_limit = capacity is not None and burst.reserved_before > self.most_full_share * capacity
        return not at_limit and burst.again_bytes >= self.least_again_share * burst.size_bytes

    def _bursts(self, case: Evidence, trace: Trace) -> list[_Burst]:
        """Runs of segment frees, with what of their sizes is taken again before the next run."""
        freed = np.flatnonzero(trace.action == Action.SEGMENT_FREE)
        if not len(freed):
            return []
        edges = np.flatnonzero(np.diff(freed) > 1)
        starts = freed[np.concatenate([[0], edges + 1])]
        ends = freed[np.concatenate([edges, [len(freed) - 1]])] + 1
        reserved = case.timeline.reserved_bytes
        bursts = []
        for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            until = int(starts[place + 1]) if place + 1 < len(starts) else len(trace)
            if start and trace.action[start - 1] == Action.OOM:
                continue
            taken = trace.size_bytes[end:until][trace.action[end:until] == Action.SEGMENT_ALLOC]
            sizes = trace.size_bytes[start:end]
            before = int(reserved[start - 1]) if start else 0
            bursts.append(_Burst(start, end, int(sizes.sum()), _common(sizes, taken), before))
        return bursts


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Bytes of the sizes that are in both."""
    sizes, counts = np.unique(first, return_counts=True)
    return sum(
        int(size) * min(int(count), int((second == size).sum()))
        for size, count in zip(sizes, counts, strict=True)
    )
