"""Rule 2: large segments that a few small blocks keep from going back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.units import MIB, format_bytes


class _Pin(NamedTuple):
    size_bytes: int
    live_bytes: int
    where: str
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FragPinned(Rule):
    """Looks at the segments of the snapshot, or of the replay when most was reserved.

    Args:
        least_segment_bytes: smaller segments are left out.
        most_live_share: a segment counts as pinned below this share of live bytes.
        least_stranded_bytes, least_stranded_share: what has to be stranded in all (of what is reserved).
        most_named: how many lines are named.
    """

    number: ClassVar[int] = 2
    id: ClassVar[str] = "FRAG_PINNED"
    title: ClassVar[str] = "Large segments that a few small blocks keep from going back"
    needs: ClassVar[tuple[Need, ...]] = ("snapshot", "trace")
    detection: ClassVar[str] = (
        "Segments of at least least_segment_bytes with less than most_live_share live, together at least "
        "least_stranded_bytes and least_stranded_share of what is reserved."
    )
    saving: ClassVar[str] = "Σ (size − live) over those segments; simulated by allocating the blocks first"
    source: ClassVar[str] = "pytorch#29554, pytorch#97925"
    stage: ClassVar[Stage] = "setting"

    least_segment_bytes: int = 20 * MIB
    most_live_share: float = 0.2
    least_stranded_bytes: int = 64 * MIB
    least_stranded_share: float = 0.05
    most_named: int = 5

    def look(self, case: Evidence) -> Iterator[Found]:
        pins, reserved = self._pins(case)
        pinned = [
            pin
            for pin in pins
            if pin.size_bytes >= self.least_segment_bytes
            and 0 < pin.live_bytes < self.most_live_share * pin.size_bytes
        ]
        stranded = sum(pin.size_bytes - pin.live_bytes for pin in pinned)
        if stranded < max(self.least_stranded_bytes, self.least_stranded_share * reserved):
            return
        pinned.sort(key=lambda pin: pin.live_bytes - pin.size_bytes)
        lines = _by_line(pinned, self.most_named)
        total = (
            f"{len(pinned)} segments with {share(stranded, reserved)} of {format_bytes(reserved)} reserved"
        )
        yield self.found(
            f"{format_bytes(stranded)} lie free in {len(pinned)} segments that small blocks keep.",
            evidence=[total, *lines],
            size_bytes=stranded,
            where=pinned[0].where or None,
            confidence="high",
            advice=[
                Advice(
                    action="Allocate what lives long (caches, statistics, buffers) before the first step, or "
                    "in a memory pool of its own.",
                    typed="pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool):\n"
                    "    cache = make_cache()  # what lives long",
                    kind="python",
                    saving_bytes=stranded,
                    cost="none",
                    source="torch.cuda.MemPool; pytorch#97925",
                )
            ],
            edit=self._edit(case, pinned),
        )

    def _pins(self, case: Evidence) -> tuple[list[_Pin], int]:
        """The segments and what is reserved in all: of the snapshot, else of the replay."""
        snapshot = case.snapshot
        if snapshot is not None and snapshot.segments:
            pins = []
            for segment in snapshot.segments:
                used = [block for block in segment.blocks if block.active]
                largest = max(used, key=lambda block: block.size_bytes, default=None)
                where = "" if largest is None else largest.where
                pins.append(_Pin(segment.size_bytes, segment.active_bytes, where, ()))
            return pins, snapshot.reserved_bytes
        if case.replay is None:
            return [], 0
        layout = case.replay.peak
        if case.replay.shortages:
            layout = case.replay.main.layouts.get(case.replay.shortages[0].failure.event, layout)
        pins = []
        for held in layout.segments:
            places = [held.offset_bytes + block.offset_bytes for block in held.blocks if block.state != "I"]
            keys = tuple(layout.owners.get((held.region, place), -1) for place in places)
            pins.append(_Pin(held.size_bytes, held.active_bytes, self._where(case, keys), keys))
        return pins, sum(held.size_bytes for held in layout.segments)

    def _where(self, case: Evidence, keys: tuple[int, ...]) -> str:
        """Where the largest of the blocks with these ids was asked for."""
        known = {key for key in keys if key >= 0}
        positions = [index for index, key in enumerate(case.blocks.ids.tolist()) if key in known]
        if not positions:
            return ""
        return case.blocks.site(max(positions, key=lambda index: int(case.blocks.size[index])))

    def _edit(self, case: Evidence, pinned: list[_Pin]) -> Edit | None:
        """The pinning blocks allocated before everything else."""
        keys = {key for pin in pinned for key in pin.keys if key >= 0}
        if not keys:
            return None
        blocks = case.blocks
        windows = {
            number: (Window(0, int(blocks.freed[index]), int(blocks.size[index])),)
            for index, number in enumerate(blocks.ids.tolist())
            if number in keys
        }
        return Edit(windows=windows)


def _by_line(pinned: list[_Pin], most: int) -> list[str]:
    """The lines whose blocks keep the most free bytes, with their segments together."""
    sums: dict[str, list[int]] = {}
    for pin in pinned:
        entry = sums.setdefault(pin.where or "an unknown place", [0, 0, 0])
        for place, amount in enumerate((1, pin.size_bytes, pin.live_bytes)):
            entry[place] += amount
    ordered = sorted(sums.items(), key=lambda item: item[1][2] - item[1][1])
    return [
        f"{count} segments of {format_bytes(size)} in all kept by {format_bytes(live)} at {where}"
        for where, (count, size, live) in ordered[:most]
    ]
