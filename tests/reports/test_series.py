from __future__ import annotations

import numpy as np

from memfit.core.trace import Action, TraceBuilder
from memfit.reports.series import StepSeries

from .conftest import BLOCKS, MIB, make_trace


def brute_force_peak(trace) -> int:
    """Live bytes event by event, the plain way."""
    live: dict[int, int] = {}
    peak = 0
    for event in trace:
        if event.action == Action.ALLOC:
            live[event.block] = event.size_bytes
        elif event.action == Action.FREE:
            live.pop(event.block)
        peak = max(peak, sum(live.values()))
    return peak


def test_the_peak_is_the_brute_force_one(plain_trace):
    series = StepSeries.of(plain_trace)
    assert series.peak_bytes == brute_force_peak(plain_trace)


def test_few_points_keep_the_peak(plain_trace):
    whole, coarse = StepSeries.of(plain_trace, points=100_000), StepSeries.of(plain_trace, points=10)
    assert len(coarse.events) <= 12 < len(whole.events)
    assert coarse.peak_bytes == whole.peak_bytes


def test_only_the_last_step_is_shown():
    one, three = (StepSeries.of(make_trace(recompute=True, steps=steps)) for steps in (1, 3))
    assert one.event_count == three.event_count
    assert np.array_equal(one.total, three.total)


def test_what_was_there_before_the_step_counts(plain_trace):
    series = StepSeries.of(plain_trace)
    assert set(series.by_category["parameter"]) == {BLOCKS * 40 * MIB}
    assert set(series.reserved) == {6600 * MIB}


def test_phases_in_order_and_recompute_within_backward(planned_trace):
    series = StepSeries.of(planned_trace)
    assert [span.phase for span in series.phases] == ["forward", "backward", "optimizer"]
    assert series.phases[0].first == 0
    assert series.phases[-1].last == series.event_count - 1


def test_micro_batches_belong_to_one_step():
    builder = TraceBuilder()
    for phase in ("forward", "backward", "forward", "backward", "optimizer") * 2:
        builder.free(builder.alloc(512, phase=phase), phase=phase)
    series = StepSeries.of(builder.build())
    assert [span.phase for span in series.phases] == [
        "forward",
        "backward",
        "forward",
        "backward",
        "optimizer",
    ]


def test_an_empty_trace_has_no_series():
    assert StepSeries.of(TraceBuilder().build()) is None


def test_a_trace_without_phases_is_shown_whole():
    builder = TraceBuilder()
    builder.alloc(512)
    builder.alloc(1024)
    series = StepSeries.of(builder.build())
    assert series.event_count == 2
    assert series.reserved is None
    assert series.peak_bytes == 1536


def test_many_micro_batches_share_one_label():
    builder = TraceBuilder()
    for phase in ("forward", "backward") * 8 + ("optimizer",):
        builder.free(builder.alloc(512, phase=phase), phase=phase)
    labels = StepSeries.of(builder.build()).phase_labels()
    assert labels == (("8 × forward and backward", 0, 31), ("optimizer", 32, 33))
