"""Rule 4: expandable segments are on beside something that they break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.allocators.candidates import shell_line
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.allocator_settings import unsafe_reasons, without_key
from memfit.analysis.rules.base import Found, Rule, Stage


@dataclass(frozen=True, kw_only=True)
class ExpandableUnsafe(Rule):
    """Looks for what does not go together with expandable segments, by version."""

    number: ClassVar[int] = 4
    id: ClassVar[str] = "EXPANDABLE_UNSAFE"
    title: ClassVar[str] = "Expandable segments are on beside something that they break"
    needs: ClassVar[tuple[Need, ...]] = ("configuration", "snapshot", "trace")
    detection: ClassVar[str] = (
        "Expandable segments are on (snapshot or environment) and the job uses CUDA IPC, custom "
        "all-reduce, a "
        "pluggable allocator, CUDA graphs on a torch before 2.15, or sets max_split_size_mb."
    )
    saving: ClassVar[str] = "none: it avoids a crash or a hang"
    source: ClassVar[str] = "pytorch#119452, #130330, #147851, #194767; vllm#42609; torchtitan#3306"
    stage: ClassVar[Stage] = "setting"

    def look(self, case: Evidence) -> Iterator[Found]:
        on = case.expandable or (case.expandable is None and case.configuration.asks_for_expandable)
        reasons = unsafe_reasons(case) if on else []
        if not reasons:
            return
        asked = case.configuration.alloc_conf or case.settings
        split_only = len(reasons) == 1 and "max_split_size_mb" in reasons[0]
        kept = without_key(asked, "max_split_size_mb" if split_only else "expandable_segments")
        yield self.found(
            f"Expandable segments are on, and {reasons[0]}.",
            severity="error",
            confidence="high",
            evidence=[f"{reason[:1].upper()}{reason[1:]}." for reason in reasons],
            advice=[
                Advice(
                    action="Drop max_split_size_mb: expandable segments do without it."
                    if split_only
                    else "Turn expandable segments off for this process.",
                    typed=shell_line(kept or "default"),
                    kind="shell",
                    saving_bytes=0,
                    cost="fragmentation may come back",
                    source=self.source,
                )
            ],
        )
