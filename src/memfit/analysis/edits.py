"""Edits of a trace: how it would look if an advice were followed. Savings are measured on what they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from memfit.core.trace import COLUMNS, NO_BLOCK, Action, Trace

_BEFORE, _MARK, _AFTER = -0.5, -0.3, -0.25  # of an event: frees, step marks, allocations put in front of it
_KEPT_ACTIONS = [int(action) for action in Action if not action.name.startswith("SEGMENT_")]


class Window(NamedTuple):
    """A life of a block: allocated before event ``start``, freed before event ``end`` (never, where that is
    the number of events), of so many bytes."""

    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What an advice changes.

    Attributes:
        windows: block id → its new lives; none, where it is not allocated any more.
        settings: the allocator's settings from then on; ``None`` leaves them.
        warm_up: run what happens between these two events once at the beginning, all of it freed after.
        by_category: bytes that fall away at the peak, by category: for cases without a trace.
    """

    windows: Mapping[int, tuple[Window, ...]] = field(default_factory=dict)
    settings: str | None = None
    warm_up: tuple[int, int] | None = None
    by_category: Mapping[str, int] = field(default_factory=dict)


def removed(ids: Iterable[int]) -> dict[int, tuple[Window, ...]]:
    """Windows of blocks that are not allocated any more."""
    return {int(number): () for number in ids}


def edited(trace: Trace, edit: Edit) -> Trace:
    """The trace as it would be. Segment events are left out: they were those of the unedited run."""
    rows = _Rows(trace, edit)
    if edit.warm_up is not None:
        rows.warm_up(*edit.warm_up)
    for number, windows in edit.windows.items():
        rows.block(number, windows)
    return rows.trace()


def with_last_requests_served(trace: Trace) -> Trace:
    """The trace with the requests that ended the run as allocations: what it would have gone on with."""
    allocs = np.flatnonzero(trace.action == Action.ALLOC)
    last = int(allocs[-1]) if len(allocs) else -1
    failed = np.flatnonzero((trace.action == Action.OOM) & (trace.size_bytes > 0))
    failed = failed[failed > last][:1]
    if not len(failed):
        return trace
    columns: dict[str, Any] = {name: getattr(trace, name).copy() for name in COLUMNS}
    columns["action"][failed] = int(Action.ALLOC)
    columns["block"][failed] = int(trace.block.max(initial=-1)) + 1
    return Trace(**columns, strings=trace.strings, meta=dict(trace.meta))


class _Rows:
    """The rows that stay, and new ones with the place where they go."""

    def __init__(self, trace: Trace, edit: Edit) -> None:
        self._trace = trace
        touched = np.array(sorted(edit.windows), dtype=np.int64)
        stays = np.isin(trace.action, _KEPT_ACTIONS)
        self._kept = np.flatnonzero(stays & ~(np.isin(trace.block, touched) & (trace.block != NO_BLOCK)))
        born = np.flatnonzero(trace.action == Action.ALLOC)
        self._born = dict(zip(trace.block[born].tolist(), born.tolist(), strict=True))
        self._next = int(trace.block.max(initial=-1)) + 1
        self._keys: list[float] = []
        self._new: list[tuple[int, int, int, int]] = []  # template, action, block, size

    def block(self, number: int, windows: tuple[Window, ...]) -> None:
        template = self._born.get(number)
        if template is None:
            return
        for order, window in enumerate(windows):
            name = number if order == 0 else self._fresh()
            self._add(window.start + _AFTER, template, Action.ALLOC, name, window.size_bytes)
            if window.end < len(self._trace):
                self._add(window.end + _BEFORE, template, Action.FREE, name, window.size_bytes)

    def warm_up(self, begin: int, end: int) -> None:
        """What was born between the two events, in front of everything; what outlives them goes at once."""
        trace = self._trace
        fresh: dict[int, tuple[int, int]] = {}
        span = max(end - begin, 1)
        for index in range(begin, min(end, len(trace))):
            action, block = int(trace.action[index]), int(trace.block[index])
            key = -2.0 + (index - begin) / span
            if action == Action.ALLOC:
                fresh[block] = (self._fresh(), index)
                self._add(key, index, action, fresh[block][0], int(trace.size_bytes[index]))
            elif action == Action.FREE and block in fresh:
                name, template = fresh.pop(block)
                self._add(key, template, action, name, int(trace.size_bytes[template]))
        for name, template in fresh.values():
            self._add(-0.9, template, Action.FREE, name, int(trace.size_bytes[template]))

    def _fresh(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def _add(self, key: float, template: int, action: int, block: int, size: int) -> None:
        self._keys.append(key)
        self._new.append((template, int(action), block, size))

    def trace(self) -> Trace:
        trace, kept = self._trace, self._kept
        new = np.array(self._new, dtype=np.int64).reshape(-1, 4)
        keys = np.concatenate([kept.astype(np.float64), np.array(self._keys, dtype=np.float64)])
        order = np.argsort(keys, kind="stable")
        templates = np.concatenate([kept, new[:, 0]])[order]
        columns: dict[str, Any] = {name: getattr(trace, name)[templates] for name in COLUMNS}
        for place, name in ((1, "action"), (2, "block"), (3, "size_bytes")):
            values = np.concatenate([getattr(trace, name)[kept].astype(np.int64), new[:, place]])
            columns[name] = values[order]
        columns["address"] = np.zeros(len(order), dtype=np.uint64)
        return Trace(**columns, strings=trace.strings, meta=_moved(trace.meta, keys[order]))


def _moved(meta: Mapping[str, Any], keys: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    ends = meta.get("step_ends")
    if not isinstance(ends, list):
        return dict(meta)
    return {**meta, "step_ends": np.searchsorted(keys, np.array(ends) + _MARK).tolist()}
