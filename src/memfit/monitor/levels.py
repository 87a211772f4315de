"""Bytes after every event of a recording, with what was there before the first one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import NO_BLOCK, Action

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """Three lines over the events of a recording.

    Args:
        live_bytes: what tensors asked for.
        allocated_bytes: the blocks that hold it.
        reserved_bytes: segments, and never less than the blocks (a trace without segments has only these).
        before_bytes: the part of ``live_bytes`` that was there before the recording.
    """

    live_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    before_bytes: Bytes

    @staticmethod
    def of(recording: Recording, timeline: Timeline) -> Levels:
        """The levels of a recording whose timeline is ``timeline``."""
        trace, start = recording.trace, recording.start
        old = (trace.action == Action.FREE) & (trace.block == NO_BLOCK)
        freed = np.cumsum(np.where(old, trace.size_bytes, 0))
        requested, blocks, segments = (
            (0, 0, 0)
            if start is None
            else (start.requested_bytes, start.allocated_bytes, start.reserved_bytes)
        )
        before = np.maximum(requested - freed, 0) + recording.held_bytes
        allocated = timeline.allocated_bytes + np.maximum(blocks - freed, 0) + recording.held_bytes
        if recording.allocated_bytes is not None:
            allocated = recording.allocated_bytes
        reserved = recording.reserved_bytes
        if reserved is None:
            reserved = timeline.reserved_bytes + segments
        return Levels(
            live_bytes=timeline.live_bytes + before,
            allocated_bytes=allocated,
            reserved_bytes=np.maximum(reserved, allocated),
            before_bytes=before,
        )
