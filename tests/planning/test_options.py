"""Prices and measures of options against a step that was written down by hand."""

from __future__ import annotations

import pytest
from imitation import MIB, gpu, step

from memfit.capture.costs import op_seconds
from memfit.capture.graph import Op, StepGraph
from memfit.core.exactness import Exactness
from memfit.planning.layout import Layout, ordered_blocks
from memfit.planning.options import KINDS, enumerate_options, save_names
from memfit.planning.problems import (
    choice_of,
    make_problem,
    measured_options,
    mixes,
    row_of_blocks,
    schedule_of,
    wanted_saves,
)
from memfit.planning.schedules import NO_LEVER, checkpointing, levers, named_schedules

BLOCKS = tuple(f"h.{i}" for i in range(4))


def seconds(graph: StepGraph) -> list[float]:
    return [op_seconds(op, gpu()) for op in graph.ops]


@pytest.fixture(scope="module")
def plain() -> Layout:
    return Layout(graph=step(4, {}), blocks=BLOCKS)


def test_blocks_come_in_the_order_of_the_forward(plain: Layout) -> None:
    assert ordered_blocks(plain.graph, ("h.3", "h.1", "nowhere", "h.0", "h.2")) == BLOCKS


def test_equal_blocks_are_one_class(plain: Layout) -> None:
    assert row_of_blocks(plain, seconds(plain.graph)).classes == ((0, 1, 2, 3),)


def test_what_blocks_keep_is_read_from_the_step(plain: Layout) -> None:
    assert plain.kept_bytes == (18 * MIB,) * 4
    recomputed = Layout(graph=step(4, {"h.1": [], "h.2": ["linear:0"]}), blocks=BLOCKS)
    assert recomputed.kept_bytes == (18 * MIB, 2 * MIB, 10 * MIB, 18 * MIB)


def test_prices_are_what_running_again_costs(plain: Layout) -> None:
    """The last linear is not run again: nobody's backward in the block reads its result."""
    costs = seconds(plain.graph)
    work = row_of_blocks(plain, costs).works[0]
    forward = plain.ops(0, "forward")
    assert [op.name for op in work.heavy] == ["linear:0"]
    assert work.option(()).recompute_seconds == pytest.approx(
        costs[forward[0].index] + costs[forward[1].index]
    )
    assert work.option(work.heavy).recompute_seconds == pytest.approx(costs[forward[1].index])
    assert {option.saves for option in enumerate_options(work)} == {(), ("linear:0",)}


def test_measured_options_predict_every_peak_of_every_schedule(plain: Layout) -> None:
    """The problem's own sum equals the peak of the step that is written down with the same plan."""
    row = row_of_blocks(plain, seconds(plain.graph))
    wanted = wanted_saves(row, limit=8)
    captured = [
        (schedule, step(4, checkpointing(BLOCKS, schedule)[0]["blocks"])) for schedule in mixes(row, wanted)
    ]
    problem = make_problem(row, plain, measured_options(row, captured, seconds))
    assert problem.peak_bytes([0] * 4) == plain.graph.peak_bytes
    for plan in (
        {"h.0": []},
        {"h.0": [], "h.1": ["linear:0"]},
        {name: [] for name in BLOCKS},
        {"h.3": ["linear:0"]},
    ):
        schedule = tuple(None if name not in plan else tuple(plan[name]) for name in BLOCKS)
        choice = choice_of(problem, schedule)
        assert choice is not None
        assert schedule_of(problem, choice) == schedule
        graph = step(4, plan)
        assert problem.peak_bytes(choice) == pytest.approx(graph.peak_bytes, abs=MIB)
        again = sum(s for op, s in zip(graph.ops, seconds(graph), strict=True) if op.phase == "recompute")
        assert problem.recompute_seconds(choice) == pytest.approx(again)


def test_mixes_show_every_set_of_every_class(plain: Layout) -> None:
    row = row_of_blocks(plain, seconds(plain.graph))
    wanted = (tuple((f"linear:{i}",) for i in range(9)),)
    shown = {saves for schedule in mixes(row, wanted) for saves in schedule}
    assert shown == set(wanted[0])


def test_named_schedules_are_distinct_and_cover_the_known_ones(plain: Layout) -> None:
    schedules = named_schedules(row_of_blocks(plain, seconds(plain.graph)).works)
    assert {"none", "full", "every 2nd block", "first half", "save matmuls and attention"} <= set(schedules)
    assert len(set(schedules.values())) == len(schedules)
    assert schedules["every 2nd block"] == ((), None, (), None)


def test_names_count_per_kind_as_the_technique_counts() -> None:
    ops = [
        Op(index=0, name="aten.addmm.default"),
        Op(index=1, name="aten.bmm.default"),
        Op(index=2, name="aten._softmax.default"),
        Op(index=3, name="aten.bmm.default"),
        Op(index=4, name="aten._scaled_dot_product_efficient_attention.default", random=True),
        Op(index=5, name="aten.native_dropout.default", random=True),
        Op(index=6, name="aten.mm.default"),
    ]
    names = [(op.index, name) for op, name in save_names(ops)]
    assert names == [
        (0, "linear:0"),
        (3, "attention:0"),
        (4, "attention:1"),
        (5, "random:1"),
        (6, "linear:1"),
    ]


def test_every_kind_is_the_techniques_own() -> None:
    from memfit.techniques.selective import _OPERATIONS

    theirs = {
        name: kind for kind, names in _OPERATIONS.items() for name in names if kind in set(KINDS.values())
    }
    assert dict(KINDS) == theirs


def test_levers_follow_what_is_allowed() -> None:
    def names(allow: str, expandable_segments: Exactness | None = None) -> list[str]:
        found = levers(
            allow,  # type: ignore[arg-type]
            samples=4,
            chunked_loss="reordered",
            micro_batching="approximate",
            implementations={"fused": "reordered"},
            expandable_segments=expandable_segments,
        )
        assert found[0] is NO_LEVER
        return [lever.name for lever in found[1:]]

    assert names("exact") == []
    assert names("exact", "exact") == ["expandable segments"]
    assert "chunked loss, fused optimizer, expandable segments" in names("reordered", "exact")
    assert names("reordered") == ["fused optimizer", "chunked loss, fused optimizer"]
    assert names("approximate")[2:4] == [
        "2 micro-batches, fused optimizer",
        "2 micro-batches, chunked loss, fused optimizer",
    ]
    assert not any("8 micro-batches" in name for name in names("approximate"))
