"""What the page is told: against the naive sums of the events, without losing a peak."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.conftest import MIB, a_long_trace, a_trace, live_feed, trace_feed
from memfit.core.errors import ToolFailure, UsageError
from memfit.core.recording import Recording
from memfit.core.timeline import Timeline
from memfit.core.trace import Action, Trace
from memfit.dashboard import api
from memfit.dashboard.feeds import LiveFeed
from memfit.dashboard.trace_series import TraceSeries
from memfit.monitor.engine import Monitor
from memfit.monitor.identity import identify
from memfit.monitor.opening import open_source
from memfit.monitor.runs import RunWriter
from memfit.monitor.samples import HostSample, Sample, Step
from monitor.fakes import GIB, FakeSource, a_gpu, a_rank


def series_of(trace: Trace) -> TraceSeries:
    return TraceSeries(Recording(trace=trace), Timeline.of(trace))


def naive(trace: Trace, event: int) -> dict[str, int]:
    live: dict[int, tuple[str, int]] = {}
    for one in list(trace)[: event + 1]:
        if one.action == Action.ALLOC:
            live[one.block] = one.category, one.size_bytes
        else:
            live.pop(one.block, None)
    sums: dict[str, int] = {}
    for category, size in live.values():
        sums[category] = sums.get(category, 0) + size
    return sums


@settings(max_examples=6)
@given(
    seed=st.integers(0, 1000), begin=st.integers(0, 190), width=st.integers(1, 200), points=st.integers(6, 80)
)
def test_any_stretch_shows_its_peak_and_its_categories(
    seed: int, begin: int, width: int, points: int
) -> None:
    trace, _ = a_long_trace(200, seed)
    series = series_of(trace)
    end = min(200, begin + width)
    events = series.chosen(begin, end, points)
    assert len(events) <= max(points, 6) and np.all(np.diff(events) > 0)
    assert begin <= events[0] and events[-1] < end
    live = series.levels.live_bytes
    assert live[events].max() == live[begin:end].max() and live[events].min() == live[begin:end].min()
    found = series.at(events)
    for place, event in enumerate(events.tolist()):
        assert {name: int(values[place]) for name, values in found.items() if values[place]} == naive(
            trace, event
        )


def test_a_million_events_keep_their_peak_at_every_zoom() -> None:
    trace, peak = a_long_trace(1_000_000)
    feed = trace_feed(trace)
    for begin, end in ((0, 10**6), (peak - 5000, peak + 3000), (peak - 3, peak + 4)):
        data = feed.timeline("", begin, end, 1500)
        tops = np.sum([band["values"] for band in data["bands"]], axis=0)
        assert len(data["x"]) <= 1500 and tops.max() == 900 * MIB
        assert data["x"][int(tops.argmax())] == peak
        assert [mark for mark in data["marks"] if mark["kind"] == "peak"] == [
            {"x": peak, "kind": "peak", "text": "peak"}
        ]
    moment = feed.moment("", peak)
    assert moment["live_bytes"] == 900 * MIB and moment["sites"][0]["where"] == "a.py:1 f"


def test_a_trace_as_the_page_sees_it() -> None:
    feed = trace_feed(a_trace())
    feed.poll()
    state = json.loads(json.dumps(feed.state, allow_nan=False))
    assert (state["kind"], state["title"], state["live"], state["ended"]) == (
        "trace",
        "t.memfit-trace",
        False,
        True,
    )
    (device,) = state["devices"]
    assert sum(part["bytes"] for part in device["account"]) == device["total_bytes"] == 1 << 30
    (one,) = state["allocators"]
    assert one["requested_bytes"] == 155 * MIB
    data = feed.timeline(one["key"], float("-inf"), float("inf"), 1000)
    assert [mark["text"] for mark in data["marks"] if mark["kind"] == "step"] == [
        f"step {n}" for n in range(1, 6)
    ]
    steps = feed.steps(one["key"], 100)
    assert steps["peak"] == [(151 + n) * MIB for n in range(5)] and steps["end"] == [
        (101 + n) * MIB for n in range(5)
    ]
    assert feed.moment(one["key"], 2)["sites"][1]["where"] == "train.py:7 step"


def test_a_played_trace_shows_what_has_been_played() -> None:
    feed = trace_feed(a_trace(40), speed=20.0)
    feed.poll()
    early = feed.timeline("", 0, 1e9, 1000)["last"]
    time.sleep(0.15)
    assert early < feed.timeline("", 0, 1e9, 1000)["last"] < 200


def test_findings_are_asked_for_and_failures_are_said() -> None:
    def fail(sample: Sample) -> list[Any]:
        raise ToolFailure("the rules are out")

    for findings, note, count in (
        (lambda sample: [{"rule": "X", "summary": "s"}], "", 1),
        (lambda sample: [], "The rules of memfit diagnose find nothing wrong.", 0),
        (fail, "No findings: the rules are out", 0),
        (lambda sample: 1 / 0, "No findings: ZeroDivisionError: division by zero", 0),
        (None, "Nobody looks for findings here.", 0),
    ):
        feed = trace_feed(a_trace(), findings=findings)
        feed.poll()
        before = feed.version
        feed.find()
        assert (feed.state["findings_note"], len(feed.state["findings"])) == (note, count)
        assert feed.version == before + (findings is not None)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """1,000 seconds and steps of a run; one peak in a single second."""
    writer = RunWriter(tmp_path / "run", identify("train", {}), interval_seconds=1)
    pid = writer._about["pid"]
    for second in range(1000):
        held = 14 * GIB if second == 333 else 10 * GIB
        rank = a_rank(allocated_bytes=held, active_bytes=held, pid=pid, ooms=int(second >= 500))
        writer.write(Sample(time_seconds=1000.0 + second, allocators=(rank,), host=HostSample(rss_bytes=1)))
        peak = (20 if second == 777 else 15) * GIB
        at = 1000.0 + second
        writer.write_step(Step(key="", number=second + 1, time_seconds=at, peak_bytes=peak, end_bytes=second))
    writer.close()
    return tmp_path / "run"


def test_a_run_from_its_records_without_losing_a_peak(run_folder: Path) -> None:
    opened = open_source(run_folder)
    feed = LiveFeed(opened, Monitor(opened.sources, rules=()))
    feed.poll()
    key = feed.state["allocators"][0]["key"]
    data = feed.timeline(key, float("-inf"), float("inf"), 50)
    bands = {band["key"]: band["values"] for band in data["bands"]}
    assert len(data["x"]) == 50 and max(bands["allocated"]) == 14 * GIB
    reserved = next(line for line in data["lines"] if line["key"] == "reserved")["values"]
    assert all(sum(values) == total for *values, total in zip(*bands.values(), reserved, strict=True))
    assert [mark["kind"] for mark in data["marks"]] == ["oom"]
    assert (data["first"], data["last"]) == (1000.0, 1999.0)
    close = feed.timeline(key, 1330, 1336, 50)
    assert close["x"] == [1330, 1331, 1332, 1333, 1334, 1335]
    steps = feed.steps(key, 40)
    assert steps["count"] == 1000 and len(steps["x"]) == 40 and max(steps["peak"]) == 20 * GIB
    assert steps["x"][-1] == 1000 and steps["end"][-1] == 999
    assert feed.timeline("nobody", 0, 1, 50)["x"] == [] and feed.steps("nobody", 9)["count"] == 0


def test_devices_from_the_monitors_history_survive_a_restart(tmp_path: Path) -> None:
    for second in range(3):
        source = FakeSource(Sample(time_seconds=100.0 + second, devices=(a_gpu(used_bytes=second * GIB),)))
        opened = live_feed(source).opened
        feed = LiveFeed(opened, Monitor([source], rules=(), history=tmp_path), device_history=tmp_path)
        feed.poll()
        data = feed.timeline("GPU-0", 0, 1e9, 100)
        assert data["bands"][0]["values"] == [n * GIB for n in range(second + 1)]
        assert data["limit_bytes"] == 80 * GIB
        feed.close()


def test_parameters_are_checked() -> None:
    feed = trace_feed(a_trace())
    with pytest.raises(UsageError, match="begin='x' is no number"):
        api.timeline(feed, {"begin": "x"})
    with pytest.raises(UsageError, match="at='nan' is no number"):
        api.moment(feed, {"at": "nan"})
    assert len(api.timeline(feed, {"points": "-5", "begin": "-1e99", "end": "inf"})["x"]) <= 6
    assert api.moment(feed, {"at": "1e99"})["at"] == len(a_trace()) - 1
    assert set(api.look(feed, {})["paints"]) >= {"activation", "free", "stranded"}
