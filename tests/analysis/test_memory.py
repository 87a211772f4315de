"""What `MemoryAnalyzer` says, against sums by hand and a naive count."""

from __future__ import annotations

import json
import random

import pytest

from memfit import InputError, MemoryAnalyzer, UsageError
from memfit.analysis import memory as memory_module
from memfit.analysis.subject import Subject
from memfit.capture.graph import Op, StepGraph, Storage
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.core.trace import CATEGORIES, PHASES, Action, TraceBuilder
from memfit.profiling.profile import Profile
from memfit.profiling.usage import StepMemory

KIB, MIB = 1 << 10, 1 << 20


def training(steps=8, leak_bytes=0):
    """Weights, and in each step an activation that dies and perhaps a little that stays."""
    builder = TraceBuilder(meta={"name": "made"})
    builder.alloc(4 * MIB, category="parameter", phase="init", module="net", where="train.py:3 main")
    for _ in range(steps):
        activation = builder.alloc(
            2 * MIB,
            category="activation",
            phase="forward",
            module="net.0",
            op="aten.mm",
            where="net.py:7 forward",
        )
        if leak_bytes:
            builder.alloc(leak_bytes, category="temporary", phase="forward", where="train.py:9 main")
        gradient = builder.alloc(
            4 * MIB, category="gradient", phase="backward", module="net", where="net.py:7 forward"
        )
        builder.free(activation, phase="backward")
        builder.free(builder.alloc(1 * MIB, phase="optimizer", where="train.py:12 main"), phase="optimizer")
        builder.free(gradient, phase="optimizer")
    return builder.build()


def test_composition_sites_and_phases():
    analysis = MemoryAnalyzer(training()).analyze()
    assert analysis.peak_bytes == 10 * MIB and analysis.peak_phase == "backward"
    assert analysis.composition["category"] == {
        "parameter": 4 * MIB, "gradient": 4 * MIB, "activation": 2 * MIB,
    }  # fmt: skip
    assert analysis.composition["module"] == {"net": 8 * MIB, "net.0": 2 * MIB}
    assert analysis.composition["where"] == {"net.py:7 forward": 6 * MIB, "train.py:3 main": 4 * MIB}
    assert analysis.phase_peaks["optimizer"] == 9 * MIB
    assert [(site.where, site.bytes, site.blocks) for site in analysis.top_sites] == [
        ("net.py:7 forward", 6 * MIB, 2), ("train.py:3 main", 4 * MIB, 1),
    ]  # fmt: skip
    assert analysis.leak is None


def test_a_random_trace_against_a_naive_count():
    draw, builder, live = random.Random(7), TraceBuilder(), {}
    best, best_live = 0, {}
    for _ in range(800):
        if live and draw.random() < 0.48:
            builder.free(live_block := draw.choice(list(live)))
            del live[live_block]
        else:
            size, category = draw.randrange(1, 100_000), draw.choice(CATEGORIES)
            live[builder.alloc(size, category=category, phase=draw.choice(PHASES))] = (size, category)
        total = sum(size for size, _ in live.values())
        if total > best:
            best, best_live = total, dict(live)
    analysis = MemoryAnalyzer(builder.build()).analyze()
    assert analysis.peak_bytes == best
    expected = {}
    for size, category in best_live.values():
        expected[category] = expected.get(category, 0) + size
    assert analysis.composition["category"] == expected
    lives = analysis.lifetimes
    assert lives.total_blocks == sum(1 for event in builder.build() if event.action.name == "ALLOC")
    assert lives.freed_blocks == lives.total_blocks - len(live)


@pytest.mark.parametrize("steps", [8, 30])
def test_a_leak_is_found_with_its_line(steps):
    analysis = MemoryAnalyzer(training(steps, leak_bytes=64 * KIB)).analyze()
    assert analysis.leak.bytes_per_step == 64 * KIB and analysis.leak.fit > 0.99
    assert [(site.where, site.bytes) for site in analysis.leak.sites] == [("train.py:9 main", 64 * KIB)]
    assert "train.py:9 main" in str(analysis)


def test_three_steps_are_too_few_for_a_leak():
    assert MemoryAnalyzer(training(3, leak_bytes=64 * KIB)).analyze().leak is None


def test_a_leak_in_the_sampled_steps_of_a_profile():
    steps = [
        StepMemory(
            number=number, seconds=1.0, detailed=True, peak_bytes=MIB, end_bytes=MIB + 100 * KIB * place,
            end_by_site={"a.py:1 keep": 100 * KIB * place, "a.py:2 main": MIB},
        )
        for place, number in enumerate((0, 1, 10, 20, 30, 40))
    ]  # fmt: skip
    profile = Profile(device_type="cpu", steps=tuple(steps), trace=training(), frequency=10)
    leak = MemoryAnalyzer(profile).analyze().leak
    assert leak.bytes_per_step == pytest.approx(100 * KIB, rel=1e-6)
    assert [(site.where, site.bytes) for site in leak.sites] == [("a.py:1 keep", 100 * KIB)]


def test_fragmentation_is_that_of_the_replayed_allocator():
    """Every second block of 12 MiB is freed, then 14 MiB ones are asked for: they fit in no hole."""
    builder = TraceBuilder()
    blocks = [builder.alloc(12 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        builder.free(block)
    for _ in range(4):
        builder.alloc(14 * MIB)
    found = MemoryAnalyzer(builder.build()).analyze().fragmentation
    assert found.peak_reserved_bytes == (8 * 12 + 4 * 14) * MIB
    assert found.live_bytes == (4 * 12 + 4 * 14) * MIB and found.largest_free_bytes == 12 * MIB
    assert found.ratio == pytest.approx(48 / 152)
    assert found.over_time[-1][1:] == (found.live_bytes, found.peak_reserved_bytes)


def test_a_trace_too_long_to_be_replayed_tells_by_its_own_segments(monkeypatch):
    builder = TraceBuilder()
    builder.append(Action.SEGMENT_ALLOC, size_bytes=20 * MIB)
    builder.free(builder.alloc(15 * MIB))
    monkeypatch.setattr(memory_module, "MOST_REPLAYED_EVENTS", 2)
    found = MemoryAnalyzer(builder.build()).analyze().fragmentation
    assert (found.source, found.peak_reserved_bytes, found.live_bytes) == ("recorded", 20 * MIB, 15 * MIB)


def test_a_snapshot_without_history():
    blocks = (
        SnapshotBlock(
            address=0, size_bytes=6 * MIB, requested_bytes=5 * MIB, state="allocated", where="a.py:1 f"
        ),
        SnapshotBlock(address=6 * MIB, size_bytes=14 * MIB, requested_bytes=0, state="inactive"),
    )
    segment = Segment(address=0, size_bytes=20 * MIB, stream=0, pool="large", blocks=blocks)
    analysis = MemoryAnalyzer(Snapshot(segments=(segment,)), gpu="rtx3060-12gb").analyze()
    assert analysis.peak_bytes == 5 * MIB and analysis.fragmentation.largest_free_bytes == 14 * MIB
    assert analysis.fragmentation.source == "snapshot" and analysis.top_sites[0].where == "a.py:1 f"
    assert "no history" in str(analysis)


def graph():
    """Storage 1 is used by the next operator and held for four more; storage 2 is used to its end."""
    ops = [
        Op(index=0, name="aten.relu.default", module="h.0", inputs=(0,), outputs=(1,)),
        Op(index=1, name="aten.mul.Tensor", module="h.0", inputs=(1,), outputs=(2,)),
        *(Op(index=i, name="aten.add_.Tensor", module="h.1", inputs=(2,), mutates=(2,)) for i in (2, 3, 4)),
        Op(index=5, name="aten.sum.default", inputs=(2,), outputs=(3,)),
    ]
    storages = (
        Storage(id=0, size_bytes=MIB, category="parameter", born=-1, name="h.0.weight"),
        Storage(id=1, size_bytes=4 * MIB, category="activation", born=0, died=5),
        Storage(id=2, size_bytes=MIB, category="temporary", born=1, died=5),
        Storage(id=3, size_bytes=4, category="temporary", born=5, died=5),
    )
    return StepGraph(ops=tuple(ops), storages=storages, name="made")


def test_a_captured_step_tells_what_lies_idle():
    analysis = MemoryAnalyzer(graph()).analyze()
    idle = analysis.lifetimes.idle
    assert [(row.where, row.bytes, row.idle_ops) for row in idle] == [("h.0 relu.default", 4 * MIB, 4)]
    whole = 4 * MIB * 5 + MIB * 4 + 4 * 1
    assert analysis.lifetimes.idle_share == pytest.approx(4 * MIB * 4 / whole)
    assert analysis.peak_bytes == graph().peak_bytes


def test_repeated_layers_are_one_row():
    builder = TraceBuilder()
    for layer in range(3):
        builder.alloc(MIB, module=f"model.h.{layer}.mlp", category="activation")
    shown = {table.title: table for table in MemoryAnalyzer(builder.build()).analyze().tables()}
    assert shown["At the peak, by module"].rows == (("model.h.*.mlp", "3.00 MiB", "100.0 %"),)


def test_it_is_text_json_and_a_picture():
    analysis = MemoryAnalyzer(training(), gpu="rtx3060-12gb").analyze()
    text = str(analysis)
    assert text.startswith("Memory\n  10.00 MiB are live at the peak, in the backward phase.")
    data = json.loads(json.dumps(analysis.to_json()))
    assert data["peak_bytes"] == 10 * MIB and data["capacity_bytes"] > 11 << 30
    assert analysis.figure().axes[0].get_legend() is not None


def test_files_are_read_by_what_they_are(tmp_path):
    path = tmp_path / "a.memfit-trace"
    training().save(path)
    assert MemoryAnalyzer(path).analyze().peak_bytes == 10 * MIB
    graph_file = tmp_path / "graph.json"
    graph_file.write_text(json.dumps(graph().to_json()))
    assert Subject.of(str(graph_file)).graph == graph()
    folder = tmp_path / "profile"
    Profile(device_type="cpu", steps=(), trace=training()).save(folder)
    assert MemoryAnalyzer(folder).analyze().peak_bytes == 10 * MIB
    with pytest.raises(InputError, match=r"folder without profile\.json"):
        MemoryAnalyzer(tmp_path)
    with pytest.raises(InputError, match="cannot read|No such file"):
        MemoryAnalyzer(tmp_path / "missing.pickle")
    with pytest.raises(UsageError, match="cannot analyse a dict"):
        MemoryAnalyzer({})
    with pytest.raises(UsageError, match="two sources of one kind"):
        Subject.of(training(), path)


def test_the_docstring():
    import doctest

    assert doctest.testmod(memory_module).attempted
