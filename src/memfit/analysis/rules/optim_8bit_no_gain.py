"""Rule 17: an 8-bit optimizer that saves next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.analysis.rules.optimizer_states import EIGHT_BIT_STATE_BYTES, trainable_count
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Optim8BitNoGain(Rule):
    """Compares what 8-bit states save with the peak.

    Args:
        most_share: of the peak; a saving below it is none.
        full_bytes: of state per parameter without 8 bits (AdamW).
    """

    number: ClassVar[int] = 17
    id: ClassVar[str] = "OPTIM_8BIT_NO_GAIN"
    title: ClassVar[str] = "An 8-bit optimizer that saves next to nothing"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "The configuration asks for an 8-bit optimizer, and P_t × (full_bytes − 2.03 B) is below "
        "most_share of "
        "the peak (few trained parameters, or activations dominate)."
    )
    saving: ClassVar[str] = "none: the numbers say why it does not help"
    source: ClassVar[str] = "bitsandbytes#22, #407; kohya_ss#415; bitsandbytes docs"
    stage: ClassVar[Stage] = "forecast"

    most_share: float = 0.05
    full_bytes: float = 8.0

    def look(self, case: Evidence) -> Iterator[Found]:
        if not case.configuration.asks_for_eight_bit or not case.peak_bytes:
            return
        count = trainable_count(case)
        saved = int(count * (self.full_bytes - EIGHT_BIT_STATE_BYTES))
        if not count or saved >= self.most_share * case.peak_bytes:
            return
        largest = max(case.by_category.items(), key=lambda item: item[1], default=("nothing known", 0))
        yield self.found(
            f"8-bit states save {format_bytes(saved)} here, {share(saved, case.peak_bytes)} of the peak.",
            severity="info",
            confidence="high",
            evidence=[
                f"{count:,} trained parameters × ({self.full_bytes:g} − {EIGHT_BIT_STATE_BYTES} B) = "
                f"{format_bytes(saved)}",
                f"the largest part of the peak is {largest[0]}: {format_bytes(largest[1])}",
            ],
            size_bytes=saved,
            advice=[
                Advice(
                    action=f"Leave the optimizer as it was, and reduce {largest[0]} instead.",
                    saving_bytes=0,
                    source=self.source,
                )
            ],
        )
