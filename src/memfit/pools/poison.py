"""A pattern in free memory, and finding out what was written over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from memfit.core.errors import UsageError
from memfit.pools.chunks import Chunk
from memfit.pools.holdings import Holding
from memfit.pools.memory import RealMemory

PATTERN = 0xDE
_FREES_REMEMBERED = 4096


class Poison:
    """Keeps every free byte of a pool at `PATTERN`."""

    def __init__(self) -> None:
        self._frees: deque[tuple[RealMemory, int, int, str]] = deque(maxlen=_FREES_REMEMBERED)

    def spread(self, memory: RealMemory, start: int, size_bytes: int) -> None:
        """Free memory is given the pattern."""
        memory.raw(start, size_bytes).fill_(PATTERN)

    def freed(self, holding: Holding) -> None:
        """A block is free: give it the pattern, remember whose it was."""
        memory, start = holding.chunk.memory, holding.offset_bytes
        self.spread(memory, start, holding.size_bytes)
        whose = f"allocated at {holding.site}" + (
            f", freed at {holding.freed_at}" if holding.freed_at else ""
        )
        self._frees.append((memory, start, holding.size_bytes, whose))

    def check(self, memory: RealMemory, start: int, size_bytes: int) -> None:
        """See that a stretch of free memory is as it was left.

        Raises:
            UsageError: something wrote there; the message names the block that lay there last.
        """
        changed = memory.raw(start, size_bytes) != PATTERN
        if not bool(changed.any()):
            return
        at = start + int(torch.nonzero(changed)[0])
        for seen, begin, length, whose in reversed(self._frees):
            if seen is memory and begin <= at < begin + length:
                raise UsageError(
                    f"use after free: byte {at - begin} of a block was written after it was"
                    f" freed; it was {whose}"
                )
        raise UsageError(
            f"byte {at} of a chunk was written, and no block has been there: a write past an end"
        )

    def spread_around(self, chunks: Iterable[Chunk], holdings: Iterable[Holding]) -> None:
        """Blocks were moved: all that is free now is given the pattern."""
        taken: dict[RealMemory, list[tuple[int, int]]] = {chunk.memory: [] for chunk in chunks}
        for holding in holdings:
            spans = taken[holding.chunk.memory]
            spans.append((holding.offset_bytes, holding.offset_bytes + holding.size_bytes))
        for memory, spans in taken.items():
            end = 0
            for start, stop in (*sorted(spans), (memory.size_bytes, memory.size_bytes)):
                self.spread(memory, end, start - end)
                end = stop
