"""Traces from logs of allocations and frees: blocks paired by address or by size, and what was there before.

A free of a block that the log never saw allocated tells that the block was there when the log began: it is
given an allocation in front of everything else, so that the levels are right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memfit.core.trace import NO_BLOCK, Action, Trace, TraceBuilder


class LogEvent(NamedTuple):
    """One event of a log: an ALLOC, a FREE, or the OOM of an allocation that failed."""

    action: Action
    size_bytes: int
    address: int = 0
    stream: int = 0


class Paired(NamedTuple):
    """A trace, how many allocations were put in front, and how many bytes they have."""

    trace: Trace
    before_count: int
    before_bytes: int


def pair(events: Iterable[LogEvent], *, kind: str) -> Paired:
    """Pair the events of a log. Without addresses a free goes to the youngest block of its size."""
    rows = list(events)
    block_of, unknown = _blocks(rows)
    builder = TraceBuilder(meta={"source": kind})
    for block, row in unknown:
        builder.alloc(row.size_bytes, block=block, stream=row.stream, address=row.address)
    for row, block in zip(rows, block_of, strict=True):
        if row.action is Action.ALLOC:
            builder.alloc(row.size_bytes, block=block, stream=row.stream, address=row.address)
        elif row.action is Action.FREE:
            builder.free(block, stream=row.stream, address=row.address)
        else:
            builder.append(Action.OOM, size_bytes=row.size_bytes, stream=row.stream)
    return Paired(builder.build(), len(unknown), sum(row.size_bytes for _, row in unknown))


def _blocks(rows: list[LogEvent]) -> tuple[list[int], list[tuple[int, LogEvent]]]:
    """The block of every event, and the blocks that were there before with the event that frees each."""
    live: dict[int, list[int]] = {}
    blocks: list[int] = []
    unknown: list[tuple[int, LogEvent]] = []
    count = 0
    for row in rows:
        key = row.address or row.size_bytes
        if row.action is Action.ALLOC:
            live.setdefault(key, []).append(count)
            blocks.append(count)
            count += 1
        elif row.action is Action.OOM:
            blocks.append(NO_BLOCK)
        elif open_blocks := live.get(key):
            blocks.append(open_blocks.pop())
        else:
            blocks.append(count)
            unknown.append((count, row))
            count += 1
    return blocks, unknown
