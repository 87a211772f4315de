"""Rule 1: memory ran out although enough was free, in pieces that are too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.allocators.shortage import Shortage
from memfit.analysis.edits import Edit
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.allocator_settings import (
    EXPANDABLE,
    expandable_advice,
    unsafe_reasons,
    with_setting,
    without_key,
)
from memfit.analysis.rules.base import Found, Rule, Stage
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class FragOom(Rule):
    """Replays the events up to the out of memory, and compares the request with the holes it may take.

    Args:
        most_pinning_lines: how many of the blocks that keep segments are named.
    """

    number: ClassVar[int] = 1
    id: ClassVar[str] = "FRAG_OOM"
    title: ClassVar[str] = "Out of memory although enough was free, in pieces that are too small"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "snapshot")
    detection: ClassVar[str] = (
        "The replay (or the recording) runs out of memory while the holes that the request may take (same "
        "stream, same pool) add up to it, and none is large enough. Where they do not add up it is said that "
        "this is not fragmentation, and how much is missing."
    )
    saving: ClassVar[str] = (
        "reserved peak now − reserved peak of the same events with expandable segments; at most the free "
        "bytes in segments that have a block in use"
    )
    source: ClassVar[str] = "pytorch#16417, #35901, #29554; PyTorch's notes on CUDA memory management"
    stage: ClassVar[Stage] = "setting"

    most_pinning_lines: int = 3

    def look(self, case: Evidence) -> Iterator[Found]:
        replay = case.replay
        if replay is None or not replay.shortages:
            return
        shortage = replay.shortages[0]
        if shortage.is_layout and shortage.usable_free_bytes >= shortage.failure.requested_bytes:
            yield self._fragmented(case, shortage)
        else:
            yield self._too_much(shortage)

    def _too_much(self, shortage: Shortage) -> Found:
        request, free = shortage.failure.requested_bytes, shortage.usable_free_bytes
        needed = shortage.missing_bytes or max(request - free, 0)
        missing = format_bytes(needed)
        return self.found(
            f"Out of memory, and not by fragmentation: {missing} more are needed than there are.",
            severity="error",
            confidence="high",
            verdict="device_full",
            evidence=shortage.sentences(),
            size_bytes=needed,
            advice=[
                Advice(
                    action=f"Lower what is live by {missing}: no setting of the allocator makes room for it.",
                    source="the replay of this recording",
                )
            ],
        )

    def _fragmented(self, case: Evidence, shortage: Shortage) -> Found:
        request, failure = format_bytes(shortage.failure.requested_bytes), shortage.failure
        pinned = [
            f"{format_bytes(pin.free_bytes)} free in a segment of {format_bytes(pin.size_bytes)}, kept by "
            f"{format_bytes(pin.live_bytes)} at {pin.blocks[0][1] or 'an unknown place'}"
            for pin in shortage.pinned[: self.most_pinning_lines]
            if pin.blocks
        ]
        stranded = sum(pin.free_bytes for pin in shortage.pinned)
        saving = min(stranded, failure.requested_bytes)
        unsafe = unsafe_reasons(case)
        warm_up = Advice(
            action="Run one step with the largest batch first: its blocks are then there for all "
            "smaller ones.",
            cost="one step",
            source="PyTorch performance tuning guide, variable input lengths",
        )
        safe = [reason for reason in unsafe if "max_split_size_mb" not in reason]
        usable = not safe and case.expandable is not True
        settings = with_setting(without_key(case.settings, "max_split_size_mb"), EXPANDABLE)
        return self.found(
            f"{request} did not fit although {format_bytes(shortage.free_bytes)} were free: the largest "
            f"usable piece had {format_bytes(shortage.largest_hole_bytes)}.",
            severity="error",
            confidence="high",
            verdict="fragmentation",
            evidence=[*shortage.sentences(), *pinned, *(f"Not expandable segments: {why}." for why in safe)],
            size_bytes=stranded,
            advice=[expandable_advice(case, saving_bytes=saving), warm_up] if usable else [warm_up],
            edit=Edit(settings=settings) if usable else None,
        )
