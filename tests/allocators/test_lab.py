"""The replay lab: what it says of a recording, against simple recordings whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.allocators import lab
from memfit.allocators.candidates import CANDIDATES, risks_of, setting_text, shell_line
from memfit.allocators.lab import replay
from memfit.allocators.settings import parse_settings
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.core.trace import Action, Trace, TraceBuilder
from memfit.formats import read_trace

MIB = 1 << 20
BASE = 0x7F0000000000


def pinned_trace() -> Trace:
    """100 MiB whose cache is pinned by one block of 5 MiB, then 98 MiB again."""
    builder = TraceBuilder()
    builder.free(builder.alloc(100 * MIB, where="train.py:1 main"))
    builder.alloc(5 * MIB, where="train.py:2 main")
    builder.alloc(98 * MIB, where="train.py:3 main")
    return builder.build()


def recorded_state() -> Recording:
    """A segment of 20 MiB with 4 MiB in use from before, which are freed by address."""
    blocks = (
        SnapshotBlock(address=BASE, size_bytes=4 * MIB, requested_bytes=4 * MIB, state="allocated"),
        SnapshotBlock(address=BASE + 4 * MIB, size_bytes=16 * MIB, requested_bytes=0, state="inactive"),
    )
    start = Snapshot(
        segments=(Segment(address=BASE, size_bytes=20 * MIB, stream=0, pool="large", blocks=blocks),)
    )
    builder = TraceBuilder()
    builder.alloc(6 * MIB, address=BASE + 4 * MIB)
    builder.append(Action.FREE, size_bytes=4 * MIB, address=BASE)
    builder.alloc(3 * MIB, address=BASE)
    return Recording(trace=builder.build(), start=start)


def test_layout_is_to_blame() -> None:
    result = replay(pinned_trace(), capacity_bytes=150 * MIB)
    assert not result.fits
    (shortage,) = result.shortages
    assert shortage.is_layout
    assert (shortage.failure.event, shortage.failure.requested_bytes) == (3, 98 * MIB)
    assert (shortage.free_bytes, shortage.hole_count, shortage.largest_hole_bytes) == (95 * MIB, 1, 95 * MIB)
    (pin,) = result.pinned
    assert pin.free_bytes == 95 * MIB
    assert pin.blocks == ((5 * MIB, "train.py:2 main", 2, None),)
    text = " ".join(shortage.sentences())
    assert "only the layout fails" in text
    assert "released nothing" in text
    assert result.advice.setting == "expandable_segments:True"
    assert result.advice.line == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert any("CUDA IPC" in risk for risk in result.advice.risks)
    chosen = next(outcome for outcome in result.outcomes if outcome.name == result.advice.setting)
    assert chosen.fits and chosen.peak_reserved_bytes <= 150 * MIB


def test_the_amount_is_to_blame() -> None:
    builder = TraceBuilder()
    builder.alloc(60 * MIB)
    builder.alloc(50 * MIB)
    result = replay(builder.build(), capacity_bytes=100 * MIB)
    (shortage,) = result.shortages
    assert not shortage.is_layout and shortage.missing_bytes == 10 * MIB
    assert result.advice.setting is None
    assert "live memory itself has to shrink" in " ".join(result.advice.sentences)
    assert "10 MiB more than there is" in shortage.sentences()[1]


def test_a_program_ends_where_memory_runs_out() -> None:
    builder = TraceBuilder()
    builder.alloc(90 * MIB)
    builder.alloc(50 * MIB)
    builder.alloc(4 * MIB)
    trace = builder.build()
    stopped = replay(trace, capacity_bytes=100 * MIB, compare=False)
    assert stopped.main.last_event == 1
    assert stopped.main.placements.tolist() == [[0, 0], [-1, 0]]
    went_on = replay(trace, capacity_bytes=100 * MIB, compare=False, stop=False)
    assert went_on.main.placements.tolist() == [[0, 0], [-1, 0], [-1, 0]]
    assert [failure.event for failure in went_on.main.failures] == [1, 2]


def test_survived_failures_do_not_end_a_replay() -> None:
    """A recorded out of memory that the program caught is tried again, and its success given back."""
    builder = TraceBuilder()
    builder.append(Action.OOM, size_bytes=90 * MIB)
    builder.alloc(60 * MIB)
    trace = builder.build()
    small = replay(trace, capacity_bytes=80 * MIB, compare=False)
    assert [failure.event for failure in small.main.failures] == [0]
    assert small.main.last_event == 1
    large = replay(trace, capacity_bytes=100 * MIB, compare=False)
    assert large.fits and large.main.total("allocated_bytes", 0) == 60 * MIB


def test_the_last_failure_stays_if_it_succeeds() -> None:
    builder = TraceBuilder()
    builder.alloc(60 * MIB)
    builder.append(Action.OOM, size_bytes=90 * MIB)
    recording = Recording(trace=builder.build(), total_bytes=100 * MIB)
    assert not replay(recording, compare=False).fits
    larger = replay(recording, capacity_bytes=200 * MIB, compare=False)
    assert larger.fits and larger.main.total("allocated_bytes", 0) == 150 * MIB


def test_starts_from_the_recorded_state() -> None:
    result = replay(recorded_state())
    assert (result.main.same_places, result.main.compared_places) == (2, 2)
    assert result.peak_reserved_bytes == 20 * MIB
    assert result.outcomes[0].start == "recorded"
    assert [outcome.start for outcome in result.outcomes[1:]] == ["empty"] * (len(result.outcomes) - 1)
    assert result.main.live_bytes.tolist() == [10 * MIB, 6 * MIB, 9 * MIB]


def test_other_settings_start_from_nothing() -> None:
    result = replay(recorded_state(), settings="expandable_segments:True", compare=False)
    assert result.outcomes[0].start == "empty"
    assert result.main.compared_places == 0
    assert result.peak_requested_bytes == 10 * MIB


def test_a_small_capacity_starts_from_nothing_too() -> None:
    assert replay(recorded_state(), capacity_bytes=21 * MIB, compare=False).outcomes[0].start == "recorded"
    small = replay(recorded_state(), capacity_bytes=16 * MIB, compare=False)
    assert small.outcomes[0].start == "empty" and not small.fits


def test_only_segments_no_events() -> None:
    recording = Recording(trace=TraceBuilder().build(), start=recorded_state().start)
    result = replay(recording)
    assert result.peak_reserved_bytes == 20 * MIB
    assert result.fits and result.pinned[0].free_bytes == 16 * MIB
    json.dumps(result.to_json(placements=True))


def test_bytes_that_were_held_all_along() -> None:
    recording = Recording(trace=pinned_trace(), held_bytes=50 * MIB)
    assert replay(recording, compare=False).peak_requested_bytes == 153 * MIB


def test_growing_buffers_are_named() -> None:
    builder = TraceBuilder()
    buffer = builder.alloc(4 * MIB)
    for step in range(2, 12):
        larger = builder.alloc(4 * step * MIB)
        builder.free(buffer)
        buffer = larger
    result = replay(builder.build())
    assert result.growth == ([44 * MIB], 10)
    assert any("1 buffers grow step by step: 10 times" in text for text in result.advice.sentences)
    assert result.peak_reserved_bytes > 3 * result.peak_requested_bytes
    assert result.bound is not None and result.bound.packing_bytes == 84 * MIB


def test_calls_of_empty_cache_are_named() -> None:
    builder = TraceBuilder()
    for _ in range(3):
        builder.free(builder.alloc(30 * MIB))
        builder.append(Action.EMPTY_CACHE)
    text = " ".join(replay(builder.build()).advice.sentences)
    assert "empty_cache() is called 3 times" in text


def test_nothing_to_gain() -> None:
    builder = TraceBuilder()
    builder.alloc(30 * MIB)
    result = replay(builder.build())
    assert result.advice.setting is None
    assert result.advice.sentences == ("No setting of the allocator would reserve noticeably less.",)
    assert result.fragmentation == 0.0


def test_recorded_settings_are_used_if_they_can_be() -> None:
    used = replay(Recording(trace=pinned_trace(), settings="max_split_size_mb:64"), compare=False)
    assert used.settings == "max_split_size_mb:64"
    broken = replay(Recording(trace=pinned_trace(), settings="explode:1"), compare=False)
    assert broken.settings == "" and "not used" in broken.warnings[0]
    driver = replay(Recording(trace=pinned_trace(), settings="backend:cudaMallocAsync"), compare=False)
    assert driver.settings == "" and "cudaMallocAsync" in driver.warnings[0]


@pytest.mark.parametrize("policy", [name for name in lab.ALLOCATORS if name != "caching"])
def test_one_policy_gives_the_head(policy: str) -> None:
    result = replay(pinned_trace(), policies=(policy,), capacity_bytes=400 * MIB)
    value = result.to_json(placements=True)
    assert value["policy"] == policy
    assert value["peak_requested_bytes"] == 103 * MIB
    assert value["peak_reserved_bytes"] >= 103 * MIB
    assert (value["num_ooms"], len(value["placements"])) == (0, 6)


def test_unknown_policies_and_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown policy 'magic'; it is one of all, caching"):
        replay(pinned_trace(), policies=("magic",))
    with pytest.raises(UsageError, match="explode"):
        replay(pinned_trace(), settings="explode:1")


def test_layouts_at_events_that_were_asked_for() -> None:
    result = replay(pinned_trace(), compare=False, layouts_at=(0, 2))
    first, second = result.layout_at(0), result.layout_at(2)
    assert first is not None and second is not None
    assert [block.state for block in first.segments[0].blocks] == ["A"]
    assert [block.state for block in second.segments[0].blocks] == ["A", "I"]
    assert second.owners == {(0, 0): 1}


def test_series_keep_their_peaks() -> None:
    builder = TraceBuilder()
    for step in range(5000):
        builder.free(builder.alloc((1 + step % 700) * 4096))
    result = replay(builder.build(), compare=False)
    over_time = result.to_json(points=50)["over_time"]
    assert len(over_time["event"]) <= 60
    assert max(over_time["requested_bytes"]) == result.peak_requested_bytes
    assert max(over_time["reserved_bytes"]) == result.peak_reserved_bytes


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.text)
def test_candidates_are_what_pytorch_accepts(candidate: Any) -> None:
    assert parse_settings(candidate.text).warnings == ()
    assert risks_of(candidate.text)
    assert shell_line(candidate.text).endswith(f"={candidate.text}")


def test_setting_words() -> None:
    assert setting_text("expandable_segments=True") == "expandable_segments:True"
    assert setting_text("roundup_power2_divisions:[256:1,>:2]") == "roundup_power2_divisions:[256:1,>:2]"


@pytest.mark.parametrize("streams", [1, 2])
def test_policies_say_that_streams_share_their_range(streams: int) -> None:
    builder = TraceBuilder()
    for number in range(4):
        builder.free(builder.alloc(MIB, stream=number % streams))
    outcome = replay(builder.build(), policies=("best_fit",)).outcomes[-1]
    assert outcome.name == "best_fit"
    assert outcome.peak_reserved_bytes == MIB
    assert any("share this policy's range" in risk for risk in outcome.risks) == (streams > 1)


def test_private_pools_in_json_lines_are_replayed_as_pytorch_does(tmp_path: Path) -> None:
    """A pool's memory serves only the pool, stays at empty_cache, and goes once the pool is let go."""
    lines: list[dict[str, object]] = [
        {"op": "alloc", "id": 1, "size": 30 << 20, "pool": 7},
        {"op": "free", "id": 1},
        {"op": "empty_cache"},
        {"op": "alloc", "id": 2, "size": 30 << 20},
        {"op": "alloc", "id": 3, "size": 30 << 20, "pool": 7, "stream": 2},
        {"op": "alloc", "id": 4, "size": 30 << 20, "pool": 7},
        {"op": "free", "id": 4},
        {"op": "release_pool", "pool": 7},
        {"op": "free", "id": 3},
        {"op": "empty_cache"},
    ]
    path = tmp_path / "pools.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    result = replay(read_trace(path), compare=False, layouts_at=[4])
    value = result.to_json(placements=True)
    assert value["placements"] == [0, 0, 1, 0, 2, 0, 0, 0]
    assert [reserved >> 20 for _, reserved in value["reserved"]] == [30, 60, 90, 60, 30]
    layout = result.layout_at(4)
    assert layout is not None
    assert [(each.private_pool, each.stream) for each in layout.segments] == [(7, 0), (0, 0), (7, 2)]
