"""What the tracker notes of one detailed step: blocks with their labels, and events in order. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.core.trace import Trace, TraceBuilder

INIT = "init"
"""The phase of blocks that were there before the step that they are noted in."""


class Block:
    """One storage: its size and where it comes from. The tracker changes its category as it learns more."""

    __slots__ = ("category", "module", "name", "number", "op", "phase", "site", "size_bytes")

    def __init__(
        self, number: int, size_bytes: int, category: str, phase: str, module: str, op: str, site: str
    ) -> None:
        self.number, self.size_bytes, self.category = number, size_bytes, category
        self.phase, self.module, self.op, self.site = phase, module, op, site
        self.name = ""


@dataclass(kw_only=True)
class StepEvents:
    """The events of one step, or of a part of one.

    Attributes:
        number: of the step, from 0.
        initial: blocks that were live when it began.
        events: ``(block, phase)`` for an allocation, ``(block, phase, op)`` for a free.
        now_bytes, peak_bytes: live now, and at most.
        peak_event: how many events had happened when the peak was reached.
    """

    number: int
    initial: list[Block] = field(default_factory=list)
    events: list[tuple[Block, str] | tuple[Block, str, str]] = field(default_factory=list)
    now_bytes: int = 0
    peak_bytes: int = 0
    peak_event: int = 0

    def live_at(self, event: int) -> list[Block]:
        """The blocks that are live after so many events, the oldest first."""
        live = {block.number: block for block in self.initial}
        for entry in self.events[:event]:
            if len(entry) == 2:
                live[entry[0].number] = entry[0]
            else:
                live.pop(entry[0].number, None)
        return list(live.values())

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes that were live after an event of each phase."""
        live = sum(block.size_bytes for block in self.initial)
        peaks: dict[str, int] = {}
        for entry in self.events:
            live += entry[0].size_bytes if len(entry) == 2 else -entry[0].size_bytes
            peaks[entry[1]] = max(peaks.get(entry[1], 0), live)
        return peaks


def sums(blocks: Iterable[Block], label: str) -> dict[str, int]:
    """Bytes by one of the labels (``"category"``, ``"module"`` …), the largest first."""
    found: dict[str, int] = {}
    for block in blocks:
        key = str(getattr(block, label))
        found[key] = found.get(key, 0) + block.size_bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def to_trace(steps: Sequence[StepEvents], meta: Mapping[str, object]) -> Trace:
    """Several steps as one trace; what happened between them is taken from who is live at their edges.

    Its meta says in ``step_ends`` the first event after each step.
    """
    builder = TraceBuilder(meta=meta)
    live: dict[int, Block] = {}
    ends: list[int] = []
    for step in steps:
        _catch_up(builder, live, {block.number: block for block in step.initial})
        for entry in step.events:
            block = entry[0]
            if len(entry) == 2:
                live[block.number] = block
                _alloc(builder, block, entry[1])
            elif live.pop(block.number, None) is not None:
                builder.free(block.number, category=block.category, phase=entry[1], op=entry[2])
        ends.append(len(builder))
    builder.meta["step_ends"] = ends
    return builder.build()


def _catch_up(builder: TraceBuilder, live: dict[int, Block], wanted: Mapping[int, Block]) -> None:
    """Frees and allocates what changed since the last step that was noted in detail."""
    for number in [number for number in live if number not in wanted]:
        builder.free(number, category=live.pop(number).category, phase="other")
    for number, block in wanted.items():
        if number not in live:
            live[number] = block
            _alloc(builder, block, INIT)


def _alloc(builder: TraceBuilder, block: Block, phase: str) -> None:
    builder.alloc(
        block.size_bytes,
        block=block.number,
        category=block.category,
        phase=phase,
        module=block.module,
        op=block.op,
        where=block.site,
    )
