"""A trace of millions of events in as many points as a picture has: any stretch of it, in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import CATEGORIES, Action
from memfit.monitor.levels import Levels

Index = npt.NDArray[np.int64]


class TraceSeries:
    """Live bytes by category and reserved bytes after any events of a recording.

    Args:
        recording: what is shown.
        timeline: its timeline.
    """

    def __init__(self, recording: Recording, timeline: Timeline) -> None:
        self.levels = Levels.of(recording, timeline)
        self.count = len(recording.trace)
        self.has_reserved = bool(
            recording.reserved_bytes is not None
            or recording.start is not None
            or np.isin(recording.trace.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)).any()
        )
        self._categories = _by_category(recording, timeline)
        self.oom_events = np.flatnonzero(recording.trace.action == Action.OOM)

    def chosen(self, begin: int, end: int, points: int) -> Index:
        """Events of a stretch that show its shape: of each of equal runs the highest and the lowest."""
        begin, end = max(0, begin), min(self.count, end)
        if end - begin <= points:
            return np.arange(begin, max(begin, end))
        live = self.levels.live_bytes[begin:end]
        size = -(-len(live) // max(1, (points - 4) // 2))
        runs = len(live) // size
        whole, rest = live[: size * runs].reshape(runs, size), np.arange(size * runs, len(live))
        offsets = np.arange(runs) * size
        of_rest = [rest[np.argmax(live[rest])], rest[np.argmin(live[rest])]] if len(rest) else []
        ends = np.array([0, len(live) - 1])
        picked = [offsets + whole.argmax(axis=1), offsets + whole.argmin(axis=1), ends, np.asarray(of_rest)]
        return begin + np.unique(np.concatenate(picked).astype(np.int64))

    def at(self, events: Index) -> Mapping[str, npt.NDArray[np.int64]]:
        """Live bytes by category after each of ``events``; what was there before is ``other``."""
        found = {}
        for name, (index, totals) in self._categories.items():
            place = np.searchsorted(index, events, side="right")
            found[name] = np.concatenate([[0], totals])[place]
        before = self.levels.before_bytes[events]
        if before.any():
            found["other"] = found.get("other", 0) + before
        return found


def _by_category(recording: Recording, timeline: Timeline) -> dict[str, tuple[Index, Index]]:
    """For each category the events that change it, and its bytes after each of them: 16 bytes an event."""
    trace = recording.trace
    deltas = np.diff(timeline.live_bytes, prepend=0)
    born = trace.alloc_index()
    category = trace.category[np.where(born >= 0, born, 0)]
    changes = deltas != 0
    found: dict[str, tuple[Index, Index]] = {}
    for name in CATEGORIES:
        if name in trace.strings:
            index = np.flatnonzero(changes & (category == trace.strings.index(name)))
            if len(index):
                found[name] = index, np.cumsum(deltas[index])
    return found


def plain(values: Any) -> list[Any]:
    """An array as JSON has it: whole numbers, NaN as null."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return list(array.tolist())
    return [None if math.isnan(value) else value for value in array.tolist()]
