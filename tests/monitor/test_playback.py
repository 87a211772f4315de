"""Traces and recorded runs played back: the naive sums of their events, at the right moments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from memfit.core.errors import InputError, UsageError
from memfit.core.recording import Recording
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.core.timeline import Timeline
from memfit.core.trace import Action, Trace, TraceBuilder
from memfit.monitor.identity import identify
from memfit.monitor.levels import Levels
from memfit.monitor.opening import open_source
from memfit.monitor.playback import RunPlayback, TracePlayback, step_starts, top_sites
from memfit.monitor.runs import RunWriter
from memfit.monitor.samples import HostSample, Sample
from monitor.fakes import a_rank

KIB = 1 << 10


def training(steps: int = 4) -> Trace:
    """A parameter for good, and per step an activation and a leak."""
    builder = TraceBuilder()
    builder.append(Action.SEGMENT_ALLOC, size_bytes=2 << 20)
    builder.alloc(100 * KIB, category="parameter", phase="init", where="model.py:3 init")
    for _ in range(steps):
        activation = builder.alloc(
            50 * KIB, category="activation", phase="forward", module="layer", where="a.py:9 f"
        )
        builder.alloc(KIB, category="other", phase="forward", where="loop.py:1 keep")
        builder.free(activation, phase="backward")
        builder.free(builder.alloc(512, category="temporary", phase="optimizer"), phase="optimizer")
    return builder.build()


def test_steps_begin_where_a_forward_follows_an_optimizer() -> None:
    assert step_starts(Recording(trace=training())).tolist() == [0, 7, 12, 17]
    steps = TracePlayback(Recording(trace=training())).steps()
    assert [step.peak_bytes for step in steps] == [(100 + 51 + n) * KIB for n in range(4)]
    assert [step.end_bytes for step in steps] == [(101 + n) * KIB for n in range(4)]


def test_plays_a_step_a_second_and_ends() -> None:
    playback = TracePlayback(Recording(trace=training(), total_bytes=1 << 30), speed=1.0)
    count = len(training())
    told = []
    for second in (0.0, 1.0, 2.0, 3.0, 4.1):
        sample = playback.read(100 + second)
        told += [step.number for step in sample.steps]
        (one,) = sample.allocators
        event = min(count - 1, int(second * count / 4))
        live = sum(
            e.size_bytes * {Action.ALLOC: 1, Action.FREE: -1}.get(e.action, 0)
            for e in list(training())[: event + 1]
        )
        assert one.requested_bytes == live == sum(one.by_category.values())
        assert one.total_bytes == 1 << 30 and one.reserved_bytes == 2 << 20
    assert sample.ended and told == [1, 2, 3, 4]


def test_a_trace_shown_whole_is_at_its_peak() -> None:
    sample = TracePlayback(Recording(trace=training()), speed=math.inf).read(0.0)
    (one,) = sample.allocators
    assert one.requested_bytes == (100 + 50 + 4) * KIB and sample.ended and len(sample.steps) == 4
    assert one.sites[0].where == "model.py:3 init" and one.sites[0].held_bytes == 100 * KIB
    assert one.sites[1] == top_sites(Timeline.of(training()))[1]
    assert (one.sites[1].module, one.sites[1].category, one.sites[1].block_count) == (
        "layer",
        "activation",
        1,
    )
    assert any("its peak" in note for note in sample.notes)


def test_what_was_there_before_the_recording_counts_until_it_is_freed() -> None:
    blocks = (
        SnapshotBlock(address=0, size_bytes=1024, requested_bytes=1000, state="allocated"),
        SnapshotBlock(address=1024, size_bytes=3072, requested_bytes=0, state="inactive"),
    )
    start = Snapshot(segments=(Segment(address=0, size_bytes=4096, stream=0, pool="small", blocks=blocks),))
    builder = TraceBuilder()
    builder.alloc(512)
    builder.append(Action.FREE, address=0, size_bytes=1000)
    recording = Recording(trace=builder.build(), start=start)
    levels = Levels.of(recording, Timeline.of(recording.trace))
    assert levels.live_bytes.tolist() == [1512, 512]
    assert levels.reserved_bytes.tolist() == [4096, 4096]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Ten seconds of a run: allocated bytes are the second."""
    writer = RunWriter(tmp_path / "run", identify("train", {}), interval_seconds=1)
    for second in range(10):
        rank = a_rank(allocated_bytes=second, pid=writer._about["pid"])
        writer.write(
            Sample(time_seconds=1000.0 + second, allocators=(rank,), host=HostSample(rss_bytes=second))
        )
    writer.close()
    return tmp_path / "run"


def test_a_recorded_run_plays_by_its_own_times(run_folder: Path) -> None:
    playback = RunPlayback(run_folder, speed=2.0)
    seen = []
    for second in (0.0, 1.0, 2.6, 4.0, 9.0):
        sample = playback.read(50 + second)
        seen.append((sample.time_seconds, sample.allocators[0].allocated_bytes, sample.host.rss_bytes))  # type: ignore[union-attr]
    assert seen == [(1000, 0, 0), (1002, 2, 2), (1005.2, 5, 5), (1008, 8, 8), (1009, 9, 9)]
    assert sample.ended
    opened = open_source(run_folder)
    assert opened.kind == "recorded run" and opened.whole
    assert opened.sources[0].read(0.0).allocators[0].allocated_bytes == 9


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        open_source(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        open_source(tmp_path / "missing")
    for speed in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="above 0"):
            open_source(tmp_path, speed=speed)
    with pytest.raises(UsageError, match="--source"):
        open_source(None, speed=2)
