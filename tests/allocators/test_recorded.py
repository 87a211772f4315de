"""Recordings of real GPUs, replayed: every placement, every total."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.allocators.lab import replay
from memfit.allocators.running import Program
from memfit.formats import read_trace

SNAPSHOTS = (
    "cs336_medium_128_inference",
    "cs336_medium_128_training",
    "cs336_medium_512_inference",
    "cs336_medium_512_training",
)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshots_replay_placement_by_placement(name: str, shared_folder: Path) -> None:
    recording = read_trace(shared_folder / "truth" / "traces" / f"{name}.json.gz")
    assert recording.notes == (), "the state at the start agrees with every event"
    result = replay(recording, compare=False)
    assert result.main.compared_places > 1000
    assert result.main.same_places == result.main.compared_places
    assert result.peak_reserved_bytes == recording.recorded_peak_reserved_bytes
    assert result.fits


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_replays_end_where_the_run_ended(name: str, shared_folder: Path) -> None:
    """Segments, blocks and their states at the end are those of the snapshot, to the byte."""
    recording = read_trace(shared_folder / "truth" / "traces" / f"{name}.json.gz")
    result = replay(recording, compare=False)
    last = result.main.layouts[result.main.last_event]
    assert recording.end is not None
    sizes = sorted(
        (segment.size_bytes, tuple((block.size_bytes, block.state != "I") for block in segment.blocks))
        for segment in last.segments
    )
    recorded = sorted(
        (segment.size_bytes, tuple((block.size_bytes, block.active) for block in segment.blocks))
        for segment in recording.end.segments
    )
    assert sizes == recorded


def test_profiler_totals_at_every_event(shared_folder: Path) -> None:
    recording = read_trace(shared_folder / "truth" / "traces" / "hta_ddp.json.gz")
    result = replay(recording, compare=False)
    assert recording.allocated_bytes is not None
    assert len(recording.trace) == 26_770
    assert result.main.live_bytes.tolist() == recording.allocated_bytes.tolist()
    assert recording.recorded_peak_reserved_bytes == 12_782_141_440


def test_kineto_peak(shared_folder: Path) -> None:
    """The published transient peak of ResNet-50, batch 32."""
    recording = read_trace(shared_folder / "truth" / "traces" / "resnet50_kineto.json.gz")
    result = replay(recording, compare=False)
    assert result.peak_requested_bytes == 2_791_636_480
    assert result.main.total("requested_bytes", 0) == 0
    assert Program.of(recording).before == ()
