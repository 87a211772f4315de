"""The caching allocator over arrays, against the one over objects and PyTorch's own: no difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.fast import engine
from memfit.allocators.fast.engine import Engine, has_numba
from memfit.allocators.replay import (
    Operation,
    Step,
    config_for,
    events_of,
    parse_operations,
    replay,
    replay_events,
    replay_operations,
)
from memfit.allocators.running import Program, Run, run_caching
from memfit.core.recording import Recording
from memfit.core.trace import Trace, TraceBuilder
from memfit.formats import read_trace

from .fresh_traces import fresh_trace
from .test_golden import SETTINGS as GOLDEN_SETTINGS
from .test_golden import TRACES, as_oracle_prints, golden
from .test_properties import steps

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba (the extra fast) is not installed")

MIB = 1 << 20
run = Engine.run
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:[1:8,16:2,>:1]",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True,garbage_collection_threshold:0.5",
    "expandable_segments:True,max_split_size_mb:64",
    "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.7",
    "max_split_size_mb:40,large_segment_size_mb:24,max_non_split_rounding_mb:30",
)


@pytest.mark.parametrize("trace", TRACES)
def test_equals_pytorch(trace: str) -> None:
    listed = parse_operations(golden(f"{trace}.jsonl").splitlines())
    for name in GOLDEN_SETTINGS:
        truth = json.loads(golden(f"{trace}.{name}.json"))
        allocator = CachingAllocator(config_for(listed, settings=truth["conf"]))
        result = as_oracle_prints(replay_events(events_of(listed.operations), allocator))
        assert result == {key: truth[key] for key in result}, name
        assert allocator.device.peak_used_bytes == truth["device"]["peak_used"]


@pytest.mark.parametrize("text", SETTINGS)
def test_fresh_traces_end_as_over_objects(text: str) -> None:
    for seed in range(12):
        trace = fresh_trace(seed, limited=seed % 2 == 0, pools=seed % 3 == 0)
        listed = parse_operations(trace.json_lines().splitlines())
        for changes in ({}, {"events": "instant"}, {"tie_break": "address"}):
            config = config_for(listed, settings=text, **changes)
            objects = as_oracle_prints(replay_operations(listed.operations, CachingAllocator(config)))
            arrays = as_oracle_prints(replay_events(events_of(listed.operations), CachingAllocator(config)))
            assert arrays == objects, (seed, changes)


@settings(max_examples=60, deadline=None)
@given(program=steps, text=st.sampled_from(SETTINGS))
def test_random_programs_end_as_over_objects(program: list[tuple[str, int, int]], text: str) -> None:
    kinds = {"alloc": Step.ALLOC, "free": Step.FREE, "record": Step.RECORD_STREAM,
             "sync": Step.SYNC, "empty": Step.EMPTY_CACHE}  # fmt: skip
    operations: list[Operation] = []
    for index, (what, number, stream) in enumerate(program):
        step = kinds[what]
        block = index if step is Step.ALLOC else number % (index + 1)
        operations.append(Operation(step, block, number if step is Step.ALLOC else 0, stream))
    config = CachingConfig(total_bytes=256 * MIB, settings=text, memory_fraction=0.9, events="manual")
    objects = as_oracle_prints(replay_operations(operations, CachingAllocator(config)))
    assert as_oracle_prints(replay_events(events_of(operations), CachingAllocator(config))) == objects


def same_runs(arrays: Run, objects: Run) -> None:
    for each in fields(Run):
        ours, theirs = getattr(arrays, each.name), getattr(objects, each.name)
        if isinstance(theirs, np.ndarray):
            assert np.array_equal(ours, theirs), each.name
        elif each.name == "layouts":
            assert ours.keys() == theirs.keys()
            for event, layout in theirs.items():
                assert ours[event].segments == layout.segments
                assert ours[event].owners == layout.owners
        else:
            assert ours == theirs, each.name


@pytest.mark.parametrize("name", ["cs336_medium_128_inference", "cs336_medium_512_inference"])
@pytest.mark.parametrize("capacity_bytes", [1 << 42, 9 << 30])
def test_recordings_run_as_over_objects(name: str, capacity_bytes: int, shared_folder: Path) -> None:
    """From the recorded state, with segments that go back; and from nothing, where memory runs out."""
    recording = read_trace(shared_folder / "truth" / "traces" / f"{name}.json.gz")
    program = Program.of(recording)
    runs = [
        run_caching(
            program,
            CachingAllocator(
                CachingConfig(total_bytes=capacity_bytes, settings=text, events="manual", tie_break=order)
            ),
            exact_start=capacity_bytes > 1 << 40,
            detailed=True,
            stop=False,
            layouts_at=frozenset({5, 900}),
            arrays=arrays,
        )
        for text, order in (("", "address"), ("expandable_segments:True", "creation"))
        for arrays in (True, False)
    ]
    same_runs(*runs[:2])
    same_runs(*runs[2:])


def long_trace(count: int) -> Trace:
    """Blocks of some sizes that live for a while each, the most of them 700 at once."""
    chance = np.random.default_rng(3)
    sizes = chance.integers(1, 40 * MIB, size=60)
    builder, live = TraceBuilder(), []
    for step in range(count):
        if len(live) > 700 or (live and step % 3 == 2):
            builder.free(live.pop(int(chance.integers(len(live)))))
        else:
            live.append(builder.alloc(int(sizes[step % 60]), stream=step % 2))
    return builder.build()


def test_long_traces_go_over_arrays_and_short_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, the answer is the same; and the tables grow on the way."""
    trace = long_trace(6000)
    used: list[int] = []
    monkeypatch.setattr(Engine, "run", lambda self, *args: used.append(1) or run(self, *args))
    short = replay(trace)
    assert used == []
    monkeypatch.setattr(engine, "FEWEST_EVENTS", 5000)
    long = replay(trace)
    assert used
    assert as_oracle_prints(long) == as_oracle_prints(short)
    same_runs(*(run_caching(Program.of(Recording(trace=trace)), CachingAllocator(), detailed=True, arrays=it)
                for it in (True, False)))  # fmt: skip


def test_numbers_that_could_overflow_stay_with_the_objects() -> None:
    huge = TraceBuilder()
    huge.alloc((1 << 63) - 1)
    many = TraceBuilder()
    many.alloc(1, stream=1 << 30)
    assert not events_of(huge.build()).suit()
    assert not events_of(many.build()).suit()
    assert events_of(long_trace(10)).suit()


PLAIN = """
import json, sys
from memfit.allocators.caching import CachingAllocator
from memfit.allocators.replay import config_for, events_of, parse_operations, replay_events
listed = parse_operations(sys.stdin)
result = replay_events(events_of(listed.operations), CachingAllocator(config_for(listed)))
print(json.dumps([result.placements.ravel().tolist(), result.stats]))
"""


def test_the_source_runs_as_plain_python_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=golden("records.jsonl"),
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    truth = json.loads(golden("records.default.json"))
    assert json.loads(done.stdout) == [truth["placements"], truth["stats"]]
