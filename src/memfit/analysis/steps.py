"""Where the steps of a job end in its trace, and what phase it is in at each event."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis.blocks import Blocks
from memfit.core.trace import PHASES, Action, Trace

FEWEST_REPEATS = 8
MOST_UNEVEN = 0.25
"""A site counts as the mark of a step where its gaps differ by at most this share (standard deviation)."""
LEAST_MARK_BYTES = 4096


def phase_at_events(trace: Trace) -> npt.NDArray[np.int32]:
    """For every event the phase that the job is in (index into ``trace.strings``): that of the latest
    allocation, for a free carries the phase in which its block was allocated."""
    allocs = trace.action == Action.ALLOC
    latest = np.maximum.accumulate(np.where(allocs, np.arange(len(trace)), 0))
    phases: npt.NDArray[np.int32] = trace.phase[latest]
    return phases


def phase_runs(trace: Trace) -> list[tuple[str, int, int]]:
    """The phases one after another, as ``(phase, first event, event after the last)``."""
    if not len(trace):
        return []
    phases = phase_at_events(trace)
    edges = np.flatnonzero(np.diff(phases)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), len(trace)]
    return [(trace.strings[phases[a]], a, b) for a, b in zip(starts, ends, strict=True)]


def step_ends(trace: Trace) -> tuple[int, ...]:
    """The first event after each step: as the trace says, else after each run of the optimizer, else where a
    large block of one site comes back evenly; empty where none of these is there."""
    known = trace.meta.get("step_ends")
    if isinstance(known, list) and _is_rising(known, len(trace)):
        return tuple(known)
    names = {trace.strings[code] for code in np.unique(trace.phase)}
    if names & {"optimizer"}:
        return tuple(end for phase, _, end in phase_runs(trace) if phase == "optimizer")
    if names & (set(PHASES) - {"init", "other"}):
        return tuple(end for phase, _, end in phase_runs(trace) if phase == "backward")
    return _recurring(trace)


def _is_rising(ends: list[Any], count: int) -> bool:
    if not ends or not all(type(end) is int for end in ends):
        return False
    return ends == sorted(ends) and ends[0] > 0 and ends[-1] <= count


def _recurring(trace: Trace) -> tuple[int, ...]:
    """Births of the rarest site and size that comes back evenly; sizes without a place tell no step."""
    blocks = Blocks.of(trace)
    placed = ~(blocks.has("where", ("",)) & blocks.has("module", ("",)) & blocks.has("op", ("",)))
    large = np.flatnonzero((blocks.size >= LEAST_MARK_BYTES) & placed)
    keys = list(zip(blocks.site_codes[large].tolist(), blocks.size[large].tolist(), strict=True))
    counts = Counter(keys)
    best: tuple[int, ...] = ()
    births: dict[tuple[int, int], list[int]] = {}
    for key, born in zip(keys, blocks.born[large].tolist(), strict=True):
        if counts[key] >= FEWEST_REPEATS:
            births.setdefault(key, []).append(born)
    for places in births.values():
        if _is_even(places, len(trace)) and (not best or len(places) < len(best)):
            best = tuple(places)
    return best


def _is_even(places: list[int], count: int) -> bool:
    """Whether the places are evenly spread, and over most of the trace."""
    gaps = np.diff(places)
    spans = places[-1] - places[0] > 0.6 * count
    return bool(spans and gaps.std() <= MOST_UNEVEN * gaps.mean())
