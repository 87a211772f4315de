"""What the best packing of a recording needs: the least memory that could have served its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.allocators.lifetimes import Lifetimes
from memfit.allocators.packing import pack
from memfit.allocators.running import Program
from memfit.allocators.settings import BLOCK_BYTES
from memfit.core.trace import Action

MOST_PACKED_BLOCKS = 4_500
"""Beyond this only the live peak is given: packing takes time that grows faster than the trace."""
EFFORT = 2_000


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How little would do.

    Attributes:
        peak_live_bytes: the most bytes live at once, in blocks of 512 bytes; nothing can be below.
        packing_bytes: height of the best packing that was found, with all lifetimes known in advance;
            ``None`` where the recording is too long to pack.
        method: what found it.
    """

    peak_live_bytes: int
    packing_bytes: int | None
    method: str

    @property
    def best_bytes(self) -> int:
        """The packing's height, or else the live peak."""
        return self.peak_live_bytes if self.packing_bytes is None else self.packing_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "peak_live_bytes": self.peak_live_bytes,
            "packing_bytes": self.packing_bytes,
            "method": self.method,
        }


def bound_of(program: Program) -> Bound:
    """The bound of a program, with what was there at its start."""
    lifetimes = lifetimes_of_program(program).rounded_to(BLOCK_BYTES)
    if not len(lifetimes):
        return Bound(peak_live_bytes=0, packing_bytes=0, method="nothing to pack")
    if len(lifetimes) > MOST_PACKED_BLOCKS:
        return Bound(
            peak_live_bytes=lifetimes.peak_live_bytes,
            packing_bytes=None,
            method="the most live bytes at once",
        )
    packing = pack(lifetimes, alignment_bytes=BLOCK_BYTES, effort=EFFORT)
    return Bound(
        peak_live_bytes=packing.peak_live_bytes, packing_bytes=packing.height_bytes, method=packing.method
    )


def lifetimes_of_program(program: Program) -> Lifetimes:
    """When each block lives, in events; what was there before begins at -1."""
    live = {key: (-1, size) for key, size, _ in program.before if size}
    rows: list[tuple[int, int, int]] = []
    for index, (action, key, size, _) in enumerate(program.rows):
        if action == Action.ALLOC and size:
            if key in live:
                begin, old = live[key]
                rows.append((begin, index, old))
            live[key] = (index, size)
        elif action == Action.FREE and key in live:
            begin, old = live.pop(key)
            rows.append((begin, index, old))
    end = max(len(program.rows), 1)
    rows += [(begin, end, size) for begin, size in live.values()]
    return Lifetimes.of(rows)
