"""What the best packing of a recording needs: the least memory that could have served its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
    events = program.events
    counts = ((events.action == Action.ALLOC) & (events.size_bytes > 0)) | (events.action == Action.FREE)
    at = np.flatnonzero(counts)
    before = [(key, size) for key, size, _ in program.before if size]
    keys = np.concatenate([np.array([key for key, _ in before], dtype=np.int64), events.block[at]])
    sizes = np.concatenate([np.array([size for _, size in before], dtype=np.int64), events.size_bytes[at]])
    born = np.concatenate([np.ones(len(before), dtype=bool), events.action[at] == Action.ALLOC])
    when = np.concatenate([np.full(len(before), -1, dtype=np.int64), at])
    order = np.argsort(keys, kind="stable")  # of each block its events in order: each life ends at the next
    keys, when = keys[order], when[order]
    ends = np.full(len(order), max(len(events), 1), dtype=np.int64)
    followed = keys[:-1] == keys[1:]
    ends[:-1][followed] = when[1:][followed]
    lives = np.flatnonzero(born[order])
    lives = lives[np.lexsort((when[lives], ends[lives]))]
    return Lifetimes(when[lives], ends[lives], sizes[order][lives])
