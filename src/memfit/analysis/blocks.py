"""The blocks of a trace as columns: when each was born and freed, and whose it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.recording import Recording
from memfit.core.snapshot import Segment
from memfit.core.trace import COLUMNS, NO_BLOCK, TEXT_COLUMNS, Action, Trace

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

HELD = "held before the recording"
"""Where a block comes from that was there all the while, at a place that the file does not tell."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """All blocks that a trace allocates, in order of birth.

    Attributes:
        trace: the trace.
        born: index of each block's ALLOC.
        freed: index of its FREE; the number of events where it is never freed.
    """

    trace: Trace
    born: Indices
    freed: Indices

    @staticmethod
    def of(trace: Trace) -> Blocks:
        """The blocks of a trace."""
        born = np.flatnonzero(trace.action == Action.ALLOC)
        frees = np.flatnonzero((trace.action == Action.FREE) & (trace.block != NO_BLOCK))
        death = np.full(len(trace), len(trace), dtype=np.int64)
        if len(frees):
            death[trace.alloc_index()[frees]] = frees
        return Blocks(trace=trace, born=born, freed=death[born])

    def __len__(self) -> int:
        return len(self.born)

    @cached_property
    def ids(self) -> Indices:
        """Each block's id in the trace."""
        return self.trace.block[self.born]

    @cached_property
    def size(self) -> Indices:
        """Requested bytes of each."""
        return self.trace.size_bytes[self.born]

    def codes(self, column: str) -> npt.NDArray[np.int32]:
        """A text column of the blocks, as indices into the trace's strings."""
        codes: npt.NDArray[np.int32] = getattr(self.trace, column)[self.born]
        return codes

    def text(self, column: str, index: int) -> str:
        """A text of one block (by its position here)."""
        return str(self.trace.strings[self.codes(column)[index]])

    def has(self, column: str, texts: Iterable[str]) -> Mask:
        """Which blocks have one of these texts."""
        wanted = [code for code, text in enumerate(self.trace.strings) if text in set(texts)]
        return np.isin(self.codes(column), wanted)

    def containing(self, column: str, parts: Iterable[str]) -> Mask:
        """Which blocks have a text with one of these parts in it (lower case)."""
        parts = tuple(parts)
        wanted = [
            code
            for code, text in enumerate(self.trace.strings)
            if text and any(part in text.lower() for part in parts)
        ]
        return np.isin(self.codes(column), wanted)

    def live_after(self, event: int) -> Mask:
        """Which are live after an event."""
        return (self.born <= event) & (self.freed > event)

    def site(self, index: int) -> str:
        """Where one was asked for: the line, or else the module and the operation."""
        where = self.text("where", index)
        names = (self.text("module", index), self.text("op", index))
        return where or " ".join(name for name in names if name) or "an unknown place"

    @cached_property
    def site_codes(self) -> Indices:
        """A number per block, equal where line, module and operation are."""
        keys = np.stack([self.codes(name) for name in ("where", "module", "op")], axis=1)
        if not len(keys):
            return np.zeros(0, dtype=np.int64)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def largest_sites(self, mask: Mask, most: int = 5) -> list[tuple[str, int, int]]:
        """Of the masked blocks the sites with the most bytes: ``(site, bytes, blocks)``."""
        chosen = np.flatnonzero(mask)
        by_site: dict[str, list[int]] = {}
        for index, size in zip(chosen.tolist(), self.size[chosen].tolist(), strict=True):
            entry = by_site.setdefault(self.site(index), [0, 0])
            entry[0] += size
            entry[1] += 1
        ordered = sorted(by_site.items(), key=lambda item: (-item[1][0], item[0]))
        return [(site, total, count) for site, (total, count) in ordered[:most]]


def whole_trace(recording: Recording) -> Trace:
    """The trace with what was held before its first event allocated at its beginning.

    Frees of such blocks are paired by their address. ``step_ends`` in its meta move along.
    """
    trace = recording.trace
    segments = recording.start.segments if recording.start is not None else ()
    prefix = _Prefix(trace)
    for segment in segments:
        prefix.segment(segment)
    if recording.held_bytes:
        prefix.block(recording.held_bytes, 0, 0, HELD)
    return prefix.joined()


class _Prefix:
    """Events to put in front of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._strings = {text: code for code, text in enumerate(trace.strings)}
        self._rows: list[dict[str, int]] = []
        self._next = int(trace.block.max(initial=-1)) + 1
        self._at: dict[int, int] = {}
        self._defaults = {name: self._code("other" if name in _NAMED else "") for name in TEXT_COLUMNS}

    def segment(self, segment: Segment) -> None:
        self._row(Action.SEGMENT_ALLOC, NO_BLOCK, segment.size_bytes, segment.stream, segment.address, "")
        for block in segment.blocks:
            if block.active:
                size = block.requested_bytes or block.size_bytes
                self._at[block.address] = self.block(size, segment.stream, block.address, block.where)

    def block(self, size: int, stream: int, address: int, where: str) -> int:
        number, self._next = self._next, self._next + 1
        self._row(Action.ALLOC, number, size, stream, address, where)
        return number

    def _row(self, action: int, block: int, size: int, stream: int, address: int, where: str) -> None:
        row = {"action": int(action), "block": block, "size_bytes": size, "stream": stream}
        self._rows.append({**row, "address": address, **self._defaults, "where": self._code(where)})

    def _code(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def joined(self) -> Trace:
        trace, count = self._trace, len(self._rows)
        if not count:
            return trace
        columns: dict[str, Any] = {}
        for name, dtype in COLUMNS.items():
            before = np.array([row[name] for row in self._rows], dtype=dtype)
            columns[name] = np.concatenate([before, getattr(trace, name)])
        columns["block"] = self._paired(columns)
        ends = trace.meta.get("step_ends")
        moved = {"step_ends": [end + count for end in ends]} if isinstance(ends, list) else {}
        return Trace(**columns, strings=tuple(self._strings), meta={**trace.meta, **moved})

    def _paired(self, columns: dict[str, Any]) -> npt.NDArray[np.int64]:
        """Block ids, with the frees of held blocks found by address, each once."""
        blocks: npt.NDArray[np.int64] = columns["block"].copy()
        foreign = np.flatnonzero((columns["action"] == Action.FREE) & (blocks == NO_BLOCK))
        for index in foreign.tolist():
            held = self._at.pop(int(columns["address"][index]), None)
            if held is not None:
                blocks[index] = held
        return blocks


_NAMED = ("category", "phase")
