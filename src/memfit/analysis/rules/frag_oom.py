"""Rule 1: memory ran out although enough was free, in pieces that are too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memfit.allocators.lab import replay
from memfit.allocators.shortage import Pinned, Shortage
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
        replayed = case.replay
        if replayed is None or not replayed.shortages:
            return
        shortage = replayed.shortages[0]
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
            evidence=[
                *shortage.sentences(),
                *pinned_lines(shortage.pinned, self.most_pinning_lines),
                *([self._tried(case, settings)] if usable else []),
                *(f"Not expandable segments: {why}." for why in safe),
            ],
            size_bytes=stranded,
            advice=[expandable_advice(case, saving_bytes=saving), warm_up] if usable else [warm_up],
            edit=Edit(settings=settings) if usable else None,
        )

    def _tried(self, case: Evidence, settings: str) -> str:
        """What the same events do with expandable segments."""
        assert case.recording is not None
        fits = replay(case.recording, settings=settings, compare=False, policies=()).fits
        end = "go through" if fits else "still run out of memory: it is not enough by itself"
        return f"With expandable segments the same events {end}."


def pinned_lines(pinned: Sequence[Pinned], most: int) -> list[str]:
    """The lines whose blocks keep the most free bytes, with their segments together."""
    sums: dict[str, list[int]] = {}
    for pin in pinned:
        where = (pin.blocks[0][1] if pin.blocks else "") or "an unknown place"
        entry = sums.setdefault(where, [0, 0, 0])
        for place, amount in enumerate((1, pin.free_bytes, pin.live_bytes)):
            entry[place] += amount
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [
        f"{format_bytes(free)} free in {count} segments, kept by {format_bytes(live)} at {where}"
        for where, (count, free, live) in ordered[:most]
    ]
