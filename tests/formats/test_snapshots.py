"""Memory snapshots: every form that PyTorch has written, and the state before their history."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from memfit.core.errors import InputError
from memfit.core.recording import Recording
from memfit.core.snapshot import Snapshot
from memfit.core.trace import Action
from memfit.formats import read_trace
from memfit.formats.snapshots import from_value

from .made import BASE, MIB, block, dumped, event, freed, segment, simple, snapshot

BOTH = "max_split_size_mb:128,expandable_segments:True"


def read(value: Any, size_bytes: int = 1 << 20) -> Recording:
    return from_value(copy.deepcopy(value), name="made", size_bytes=size_bytes)


def layout(snapshot: Snapshot | None) -> list[tuple[int, int, str]]:
    assert snapshot is not None
    return [(b.address - BASE, b.size_bytes, b.state) for b in snapshot.blocks()]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    recording = read_trace(dumped(simple(), tmp_path / "anything.bin", protocol))
    assert recording.kind == "memory-snapshot"
    actions = [Action(action).name for action in recording.trace.action]
    assert actions == ["SEGMENT_ALLOC", "ALLOC", "ALLOC", "FREE"]
    assert recording.trace[1].where == "/home/me/train.py:12 step"
    assert recording.start is None
    assert recording.recorded_peak_reserved_bytes == 20 * MIB
    assert recording.end is not None and recording.end.allocated_bytes == 2 * MIB


def test_gzip_and_json_give_the_same(tmp_path: Path) -> None:
    plain = read_trace(dumped(simple(), tmp_path / "a"))
    packed = tmp_path / "b"
    packed.write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    as_json = tmp_path / "c"
    as_json.write_text(json.dumps(simple()))
    for path in (packed, as_json):
        other = read_trace(path)
        assert other.trace == plain.trace
        assert layout(other.end) == layout(plain.end)


def test_older_snapshots_are_lists_of_segments() -> None:
    recording = read(simple()["segments"])
    assert len(recording.trace) == 0
    assert layout(recording.start) == layout(recording.end)
    assert recording.start is not None and recording.start.reserved_bytes == 20 * MIB


def test_blocks_without_addresses_follow_each_other() -> None:
    rows = [{"size": 4 * MIB, "state": "active_allocated"}, {"size": 16 * MIB, "state": "inactive"}]
    recording = read([segment(BASE, 20 * MIB, rows)])
    assert layout(recording.end) == [(0, 4 * MIB, "allocated"), (4 * MIB, 16 * MIB, "inactive")]


def test_the_state_before_the_history() -> None:
    """A was there and is freed, B was there and stays, C comes and stays."""
    history = [
        *freed(BASE, 4 * MIB - 100),
        event("alloc", BASE + 12 * MIB, 2 * MIB),
        event("segment_alloc", BASE + 64 * MIB, 30 * MIB),
        event("alloc", BASE + 64 * MIB, 30 * MIB),
    ]
    blocks = [
        block(BASE, 8 * MIB, state="inactive"),
        block(BASE + 8 * MIB, 4 * MIB),
        block(BASE + 12 * MIB, 2 * MIB),
        block(BASE + 14 * MIB, 6 * MIB, state="inactive"),
    ]
    segments = [
        segment(BASE, 20 * MIB, blocks),
        segment(BASE + 64 * MIB, 30 * MIB, [block(BASE + 64 * MIB, 30 * MIB)]),
    ]
    recording = read(snapshot(segments, history))
    assert recording.notes == ()
    assert layout(recording.start) == [
        (0, 4 * MIB, "allocated"),
        (4 * MIB, 4 * MIB, "inactive"),
        (8 * MIB, 4 * MIB, "allocated"),
        (12 * MIB, 8 * MIB, "inactive"),
    ]
    first_free = recording.trace[0]
    assert (first_free.action, first_free.block, first_free.address) == (Action.FREE, -1, BASE)


@pytest.mark.parametrize(
    ("behind", "size"),
    [(None, 4 * MIB + MIB // 2), (BASE + 4 * MIB + MIB // 4, 4 * MIB + MIB // 4)],
    ids=["a gap too small to be free", "an allocation right behind"],
)
def test_rests_that_were_not_split_off(behind: int | None, size: int) -> None:
    """The block asked for 4 MiB, and has more: what follows it tells."""
    end = BASE + (4 * MIB + MIB // 2 if behind is None else 20 * MIB)
    history = [] if behind is None else [event("alloc", behind, 2 * MIB), *freed(behind, 2 * MIB)]
    history += freed(BASE, 4 * MIB)
    blocks = [block(BASE, end - BASE, state="inactive")]
    recording = read(snapshot([segment(BASE, end - BASE, blocks)], history))
    assert layout(recording.start)[0] == (0, size, "allocated")


def test_segments_that_went_back_were_there() -> None:
    history = [*freed(BASE, 30 * MIB), event("segment_free", BASE, 30 * MIB)]
    recording = read(snapshot([], history))
    assert layout(recording.start) == [(0, 30 * MIB, "allocated")]


def test_pages_of_expandable_segments() -> None:
    history = [
        event("segment_map", BASE + 20 * MIB, 20 * MIB),
        event("alloc", BASE + 16 * MIB, 8 * MIB),
        *freed(BASE + 16 * MIB, 8 * MIB),
        event("segment_unmap", BASE, 20 * MIB),
    ]
    held = segment(
        BASE + 20 * MIB, 20 * MIB, [block(BASE + 20 * MIB, 20 * MIB, state="inactive")], is_expandable=True
    )
    recording = read(snapshot([held], history, expandable_segments=True))
    assert recording.notes == ()
    assert layout(recording.start) == [(0, 20 * MIB, "inactive")]
    assert recording.settings == "expandable_segments:True"


def test_events_that_contradict_the_end_are_counted() -> None:
    recording = read(snapshot([], [event("alloc", BASE, 512)]))
    assert "1 events contradict" in recording.notes[0]


def test_a_lost_free_is_noted() -> None:
    history = [event("alloc", BASE, 2 * MIB), event("alloc", BASE, 4 * MIB)]
    recording = read({"device_traces": [history]})
    assert [Action(a).name for a in recording.trace.action] == ["ALLOC", "FREE", "ALLOC"]
    assert any("1 frees are missing" in note for note in recording.notes)


def test_out_of_memory_tells_the_capacity() -> None:
    history = [event("segment_alloc", BASE, 20 * MIB), event("oom", 5 * MIB, 64 * MIB)]
    recording = read({"device_traces": [history]})
    assert recording.total_bytes == 25 * MIB
    last = recording.trace[1]
    assert (last.action, last.size_bytes, last.address) == (Action.OOM, 64 * MIB, 0)


def test_the_gpu_that_holds_most_is_read() -> None:
    other = segment(BASE, 40 * MIB, [block(BASE, 40 * MIB)], device=1)
    value = snapshot([segment(BASE, 20 * MIB, [block(BASE, 20 * MIB)]), other], [], [])
    recording = read(value)
    assert recording.end is not None and recording.end.reserved_bytes == 40 * MIB
    assert "Only GPU 1" in recording.notes[0]


def test_private_pools_are_kept_apart() -> None:
    history = [event("alloc", BASE, 512, pool_id=(0, 0)), event("alloc", BASE + MIB, 512, pool_id=(0, 1))]
    recording = read({"device_traces": [history]})
    assert recording.trace.stream.tolist() == [0, 1]
    assert "private pool" in " ".join(recording.notes)


def test_streams_are_numbered_as_they_appear() -> None:
    history = [
        event("alloc", BASE + i * MIB, 512, stream=handle) for i, handle in enumerate((94032, 0, 7, 94032))
    ]
    assert read({"device_traces": [history]}).trace.stream.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"max_split_size": 128 * MIB, "expandable_segments": True}, BOTH),
        ({"garbage_collection_threshold": 0.5}, "garbage_collection_threshold:0.5"),
        ({"max_split_size": -1}, ""),
        ({"max_split_size": True, "expandable_segments": 1}, ""),
    ],
)  # fmt: skip
def test_settings_as_the_variable_has_them(settings: dict[str, Any], text: str) -> None:
    assert read(snapshot(simple()["segments"], [], **settings)).settings == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "neither segments nor device_traces"),
        ([1], r"segments\[0\] is 1, not a dictionary"),
        ({"segments": 5}, "segments is 5, not a list"),
        ({"device_traces": {}}, "device_traces is a dict of 0, not a list"),
        ({"device_traces": [[1]]}, r"device_traces\[0\]\[0\] is 1, not a dictionary"),
        ({"device_traces": [[{"addr": 1}]]}, "has no 'action'"),
        ({"device_traces": [[event("alloc", -1, 5)]]}, r"\[0\]: addr is -1, which is out of range"),
        ({"device_traces": [[event("alloc", 1, "5")]]}, "size is '5', not a whole number"),
        ({"device_traces": [[event("alloc", 1, 10**30)]]}, "size is .*, which is out of range"),
        ({"device_traces": [[event("alloc", 1, 5, stream=None)]]}, "stream is None"),
        ([segment(BASE, 5, [block(BASE, 10)])], "blocks of 10 bytes in 5"),
        ([segment(BASE, 10, [block(BASE, 5), block(BASE, 5)])], "a block at"),
        ([segment(BASE, 10, [block(BASE, 10, state="sleeping")])], "state is 'sleeping'"),
        ([segment(BASE, 10, [block(BASE, 10)], device="x")], "device is 'x'"),
    ],
)
def test_wrong_values_are_named(value: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(value)


def test_the_same_blocks_over_and_over_are_refused() -> None:
    """A file of some kilobytes may refer to one list of blocks from each of its segments."""
    many = [block(BASE + 512 * i, 512) for i in range(1000)]
    with pytest.raises(InputError, match="over and over"):
        read([segment(BASE, 512_000, many)] * 1000, size_bytes=50_000)
