"""The step graph against a plain loop over its lives, and its two file forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.capture.graph import Op, StepGraph, Storage
from memfit.core.errors import InputError
from memfit.core.timeline import Timeline


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 12))
    phases = draw(
        st.lists(st.sampled_from(["forward", "backward", "recompute"]), min_size=count, max_size=count)
    )
    ops = tuple(
        Op(
            index=i,
            name=f"aten.op{i % 3}.default",
            module=f"layer.{i % 4}",
            phase=phase,
            flops=i,
            inputs=(i,),
            temporary_bytes=draw(st.sampled_from([0, 0, 700])),
        )
        for i, phase in enumerate(phases)
    )
    storages = []
    for number in range(draw(st.integers(1, 20))):
        born = draw(st.integers(-1, count - 1))
        died = draw(st.one_of(st.just(-1), st.integers(max(born, 0), count - 1)))
        category = draw(st.sampled_from(["activation", "parameter", "temporary"]))
        saved = born >= 0 and draw(st.booleans())
        size = draw(st.integers(0, 10_000))
        storages.append(
            Storage(id=number, size_bytes=size, category=category, born=born, died=died, saved=saved)
        )
    return StepGraph(ops=ops, storages=tuple(storages), name="made up", modules={"layer.0": "Linear"})


def live(graph, index):
    return [s for s in graph.storages if s.born <= index and (s.died == -1 or index <= s.died)]


@given(graphs())
def test_live_bytes_equal_a_plain_loop(graph):
    expected = [sum(s.size_bytes for s in live(graph, op.index)) + op.temporary_bytes for op in graph.ops]
    assert graph.live_bytes_curve().tolist() == expected
    assert graph.peak_bytes == max(expected)
    assert expected[graph.peak_index] == graph.peak_bytes
    assert sum(graph.by_category().values()) == graph.peak_bytes
    assert list(graph.live_at(graph.peak_index)) == live(graph, graph.peak_index)
    assert max(graph.phase_peaks().values()) == graph.peak_bytes


@given(graphs())
def test_json_reads_back_equal(graph):
    assert StepGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@given(graphs())
def test_the_trace_has_the_same_peak_and_length(graph):
    trace = graph.to_trace()
    assert len(trace) == graph.event_count
    assert Timeline.of(trace).peak_bytes == graph.peak_bytes


@given(graphs())
def test_modules_add_up(graph):
    for depth in (None, 1, 2):
        totals = graph.by_module(depth).values()
        assert sum(total.ops for total in totals) == len(graph.ops)
        assert sum(total.flops for total in totals) == graph.flops
        assert sum(total.recompute_flops for total in totals) == graph.recompute_flops
        assert sum(total.saved_bytes for total in totals) == graph.saved_bytes


def test_a_module_owns_what_is_inside_it_and_no_neighbour():
    names = ("layer.1", "layer.1.mlp", "layer.10", "")
    graph = StepGraph(
        ops=tuple(Op(index=i, name="aten.relu.default", module=m) for i, m in enumerate(names)), storages=()
    )
    assert [op.module for op in graph.under("layer.1")] == ["layer.1", "layer.1.mlp"]
    assert len(graph.under("")) == 4
    assert graph.under("layer.1", phases=["backward"]) == ()


def test_a_storage_that_dies_in_an_operator_is_alive_while_it_runs():
    graph = StepGraph(
        ops=(Op(index=0, name="aten.relu.default"), Op(index=1, name="aten.relu.default")),
        storages=(
            Storage(id=0, size_bytes=10, category="input", born=-1, died=0),
            Storage(id=1, size_bytes=5, category="activation", born=0),
        ),
    )
    assert graph.live_bytes.tolist() == [15, 5]


@pytest.mark.parametrize(
    "broken",
    [{}, {"schema_version": 99}, {"schema_version": 1}, {"schema_version": 1, "ops": {"name": [1], "x": []}}],
)
def test_broken_json_is_an_input_error(broken):
    with pytest.raises(InputError):
        StepGraph.from_json(broken)


def test_the_graph_needs_no_torch(python_without_torch):
    assert python_without_torch("import memfit.capture.graph, memfit.capture.costs, memfit.capture") == ""
