"""What a file tells of the memory of a run: the events, what was held before them, and the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.snapshot import Snapshot
from memfit.core.timeline import Timeline
from memfit.core.trace import Action, Trace

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A trace with the state that it begins from, whatever kind of file it was read from.

    Args:
        trace: the events. A FREE of a block that was there before has no block id, but its address.
        start: what the allocator held before the first event; ``None`` where that was nothing, or is unknown.
        end: what it held after the last one; ``None`` where the file does not say.
        held_bytes: bytes that were allocated all the while, at places that the file does not tell.
        total_bytes: memory of the device, as far as the process could use it; ``None`` where unknown.
        memory_fraction: as ``torch.cuda.set_per_process_memory_fraction``.
        settings: the allocator's settings in the run, as ``PYTORCH_ALLOC_CONF`` writes them.
        allocated_bytes, reserved_bytes: the totals that were recorded after each event, where they were.
        kind: the kind of file, a name of ``memfit.formats.FORMATS``.
        notes: what the reader had to assume, a sentence each.
        private_streams: stream numbers of the trace that stand for a private pool (``torch.cuda.MemPool``,
            CUDA graphs) on a stream: the stream's number and the pool's, counted from 1.
    """

    trace: Trace
    start: Snapshot | None = None
    end: Snapshot | None = None
    held_bytes: int = 0
    total_bytes: int | None = None
    memory_fraction: float | None = None
    settings: str = ""
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    kind: str = "memfit-trace"
    notes: tuple[str, ...] = field(default=())
    private_streams: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def recorded_peak_reserved_bytes(self) -> int | None:
        """The most that the run itself had reserved; ``None`` where neither totals nor segments say it."""
        if self.reserved_bytes is not None and len(self.reserved_bytes):
            return int(self.reserved_bytes.max())
        before = 0 if self.start is None else self.start.reserved_bytes
        over_time = Timeline.of(self.trace).reserved_bytes
        has_segments = bool(np.isin(self.trace.action, _SEGMENT_ACTIONS).any())
        if not has_segments and self.start is None:
            return None
        return before + int(over_time.max(initial=0))

    def to_json(self) -> dict[str, Any]:
        """What the file is, for the head of a report."""
        return {
            "kind": self.kind,
            "event_count": len(self.trace),
            "start_reserved_bytes": 0 if self.start is None else self.start.reserved_bytes,
            "held_bytes": self.held_bytes,
            "total_bytes": self.total_bytes,
            "memory_fraction": self.memory_fraction,
            "settings": self.settings,
            "recorded_peak_reserved_bytes": self.recorded_peak_reserved_bytes,
            "notes": list(self.notes),
        }


_SEGMENT_ACTIONS = [
    int(action)
    for action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
]
