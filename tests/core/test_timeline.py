"""The timeline against a plain loop over the events."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings

from memfit.core.timeline import Timeline
from memfit.core.trace import Action, Trace, TraceBuilder

from .test_trace import builders


class NaiveMemory:
    """One dictionary of live blocks and a counter of segments, event by event."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, str]] = {}
        self.reserved = 0

    def see(self, trace: Trace, index: int) -> None:
        event = trace[index]
        if event.action is Action.ALLOC:
            self.live[event.block] = (event.size_bytes, event.category)
        elif event.action is Action.FREE:
            self.live.pop(event.block, None)
        elif event.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self.reserved += event.size_bytes
        elif event.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            self.reserved -= event.size_bytes

    def live_bytes(self) -> int:
        return sum(size for size, _ in self.live.values())

    def allocated_bytes(self) -> int:
        return sum((size + 511) // 512 * 512 for size, _ in self.live.values())

    def by_category(self) -> dict[str, int]:
        held: dict[str, int] = defaultdict(int)
        for size, category in self.live.values():
            held[category] += size
        return {category: size for category, size in held.items() if size}


@given(builders())
@settings(max_examples=80, deadline=None)
def test_equals_a_plain_loop(builder: TraceBuilder) -> None:
    trace = _within_int64(builder.build())
    timeline = Timeline.of(trace)
    memory = NaiveMemory()
    series = timeline.by_category(points=10**6)
    assert series.index.tolist() == list(range(len(trace)))
    peak_by_phase: dict[str, int] = defaultdict(int)
    for index in range(len(trace)):
        memory.see(trace, index)
        assert timeline.live_bytes[index] == memory.live_bytes()
        assert timeline.allocated_bytes[index] == memory.allocated_bytes()
        assert timeline.reserved_bytes[index] == memory.reserved
        live = timeline.live_at(index)
        assert live.by_block == {block: size for block, (size, _) in memory.live.items()}
        assert live.by_category == memory.by_category()
        assert live.total_bytes == memory.live_bytes()
        held = {name: values[index] for name, values in series.bytes_by_category.items() if values[index]}
        assert held == memory.by_category()
        phase = trace[index].phase
        peak_by_phase[phase] = max(peak_by_phase[phase], memory.live_bytes())
    assert timeline.peak_by_phase() == peak_by_phase
    assert timeline.peak_bytes == max(timeline.live_bytes.tolist(), default=0)


def _within_int64(trace: Trace) -> Trace:
    """The same events with sizes whose sums cannot overflow."""
    from dataclasses import replace

    return replace(trace, size_bytes=trace.size_bytes >> 8)


def _long_trace(events: int) -> Trace:
    """Many blocks, sizes and lifetimes from a fixed generator, with one short peak."""
    random = np.random.default_rng(0)
    builder = TraceBuilder()
    live: list[int] = []
    for index in range(events):
        if live and random.random() < 0.5:
            builder.free(live.pop(int(random.integers(len(live)))))
        else:
            category = ("activation", "gradient", "temporary")[index % 3]
            live.append(builder.alloc(int(random.integers(1, 10**6)), category=category))
        if index == events // 3:
            builder.free(builder.alloc(10**12, category="workspace"))
    return builder.build()


@pytest.mark.parametrize("points", [1, 2, 3, 10, 100, 999, 5000])
def test_fewer_points_never_lose_the_peak(points: int) -> None:
    timeline = Timeline.of(_long_trace(3000))
    series = timeline.by_category(points)
    assert len(series.index) <= max(points, 3)
    assert np.all(np.diff(series.index) > 0)
    assert timeline.peak_index in series.index
    assert series.total_bytes.max() == timeline.peak_bytes > 10**12
    assert series.bytes_by_category["workspace"].max() == 10**12
    assert np.array_equal(series.total_bytes, timeline.live_bytes[series.index])
    if points > 2:
        assert (series.index[0], series.index[-1]) == (0, 3001)


def test_empty_trace() -> None:
    timeline = Timeline.of(TraceBuilder().build())
    assert (timeline.peak_bytes, timeline.peak_index, timeline.peak_reserved_bytes) == (0, -1, 0)
    assert timeline.live_at().by_category == {}
    assert timeline.peak_by_phase() == {}
    assert len(timeline.by_category().index) == 0


def test_free_of_what_came_before_the_trace_changes_nothing() -> None:
    builder = TraceBuilder()
    builder.append(Action.FREE, size_bytes=4096)
    builder.alloc(100)
    assert Timeline.of(builder.build()).live_bytes.tolist() == [0, 100]


def test_blocks_at_the_peak_are_shown_largest_first() -> None:
    builder = TraceBuilder()
    for size, module in [(10, "a"), (30, "b"), (20, "a"), (5, "c")]:
        builder.alloc(size, module=module)
    live = Timeline.of(builder.build()).live_at()
    assert list(live.by_block.items()) == [(1, 30), (2, 20), (0, 10), (3, 5)]
    assert list(live.by("module").items()) == [("a", 30), ("b", 30), ("c", 5)]


def test_index_outside_the_trace_is_refused() -> None:
    timeline = Timeline.of(_long_trace(10))
    with pytest.raises(IndexError, match="event 99 of a trace of 12 events"):
        timeline.live_at(99)
