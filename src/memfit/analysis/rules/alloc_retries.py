"""Rule 6: the allocator has to flush its cache to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage


@dataclass(frozen=True, kw_only=True)
class AllocRetries(Rule):
    """Looks at the counters of the allocator, or counts the flushes of the replay.

    Args:
        least_retries: fewer are not reported.
        warm_up_samples: samples of the counters that are not looked at for calls of the device.
        least_device_calls: calls of cudaMalloc after the warm-up that count as steady.
    """

    number: ClassVar[int] = 6
    id: ClassVar[str] = "ALLOC_RETRIES"
    title: ClassVar[str] = "Memory is at its limit: the cache is flushed to go on"
    needs: ClassVar[tuple[Need, ...]] = ("statistics", "trace")
    detection: ClassVar[str] = (
        "num_alloc_retries rises (statistics, or the replay within the device's memory), or num_device_alloc "
        "goes on rising after warm_up_samples."
    )
    saving: ClassVar[str] = "time: retries × the time of a flush, which waits for the GPU; no bytes"
    source: ClassVar[str] = "torch.cuda.memory_stats; EasyContext#11"
    stage: ClassVar[Stage] = "forecast"

    least_retries: int = 1
    warm_up_samples: int = 2
    least_device_calls: int = 8

    def look(self, case: Evidence) -> Iterator[Found]:
        samples = case.statistics
        retries = _rise(samples, "num_alloc_retries", len(samples) - 1) if samples else 0
        calls = _rise(samples, "num_device_alloc", len(samples) - 1 - self.warm_up_samples)
        replay = case.replay
        if not samples and replay is not None:
            retries = int(replay.main.stats["num_alloc_retries"]) - len(replay.main.failures)
        if retries >= self.least_retries:
            steps = f" in {len(samples)} samples" if len(samples) > 1 else ""
            source = "memory_stats" if samples else "the replay"
            yield self.found(
                f"The cache was flushed {retries} times to go on: memory is at its limit.",
                evidence=[f"num_alloc_retries: {retries}{steps} ({source})"],
                confidence="high",
                advice=[self._advice()],
            )
        elif calls >= self.least_device_calls:
            yield self.found(
                f"The device was asked for memory {calls} times after the warm-up: sizes keep changing.",
                evidence=[f"num_device_alloc rises by {calls} over {len(samples)} samples"],
                advice=[self._advice()],
            )

    def _advice(self) -> Advice:
        return Advice(
            action="Lower the peak (see the other findings), or keep shapes the same: each flush gives all "
            "cached memory back and waits for the GPU.",
            saving_bytes=0,
            cost="what the chosen change costs",
            source=self.source,
        )


def _rise(samples: Sequence[Mapping[str, int]], key: str, back: int) -> int:
    """By how much a counter rose over the last samples; of a single one, what it shows."""
    values = [int(sample[key]) for sample in samples if key in sample]
    if len(values) == 1:
        return values[0] if key == "num_alloc_retries" else 0
    kept = values[-back - 1 :] if back > 0 else []
    return kept[-1] - kept[0] if len(kept) > 1 else 0
