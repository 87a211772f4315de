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


SCRIPT = """
import torch
torch.cuda.memory._record_memory_history(max_entries=500)
model = torch.nn.Sequential(torch.nn.Linear(500, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 500)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for step in range(20):
    model(torch.randn(64 + step * 7, 500, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.stream(side):
        other = torch.empty(3_000_000 + step * 99_999, device="cuda")
    other.record_stream(torch.cuda.current_stream())
    del other
    if step == 12:
        torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot("cut.pickle")
"""


@pytest.mark.dryrun
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:20"])
def test_fresh_recordings_replay_exactly(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch's own allocator does now: whole histories, and one whose beginning is cut off."""
    from memfit.core.devices import find_gpu
    from memfit.dryrun import run_script

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_script(
        ["train.py"],
        gpu=find_gpu("h100-80gb"),
        steps="all",
        snapshot=tmp_path / "whole.pickle",
        trace=tmp_path / "whole.memfit-trace",
        allow_writes=True,
        output="stderr",
    )
    assert result.exit_code == 0
    for name in ("whole.pickle", "cut.pickle", "whole.memfit-trace"):
        recording = read_trace(tmp_path / name)
        replayed = replay(recording, compare=False)
        assert (recording.settings, recording.notes) == (settings, ())
        assert (recording.start is not None) == (name == "cut.pickle")
        assert replayed.main.same_places == replayed.main.compared_places > 100
        assert replayed.peak_reserved_bytes == recording.recorded_peak_reserved_bytes
        assert replayed.peak_reserved_bytes <= result.peak_reserved_bytes
