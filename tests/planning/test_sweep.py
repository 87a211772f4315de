"""The front of a small model against all of its schedules, run one by one; and what is shown of it."""

from __future__ import annotations

import itertools
import json

import pytest
from imitation import Imitation, gpu, step

from memfit import cli
from memfit.core.errors import UsageError
from memfit.planning import sweep as sweep_module
from memfit.planning.bound import lower_bound, lower_bounds
from memfit.planning.sweep import FrontSearch, SweepResult, _result, sweep
from memfit.reports.sweep import sweep_page, sweep_png, sweep_text
from memfit.reports.text import to_text

BLOCKS = 4


@pytest.fixture(scope="module")
def result() -> SweepResult:
    found = FrontSearch(oracle=Imitation(blocks=BLOCKS), gpu=gpu(), points=6)
    return _result(found, found.run(), spec=None, seed=0, planning_seconds=1.0, wall_seconds=1.0)


def test_no_schedule_at_all_is_better_than_the_front(result: SweepResult) -> None:
    oracle = Imitation(blocks=BLOCKS)
    everything = []
    for choice in itertools.product((None, (), ("linear:0",)), repeat=BLOCKS):
        blocks = {f"h.{i}": saves for i, saves in enumerate(choice) if saves is not None}
        techniques = [{"technique": "gradient_checkpointing", "blocks": blocks}] if blocks else []
        everything.append(oracle.final(techniques).figures)
    assert len(result.points) == 6
    for point in result.points:
        fitting = [f.step_seconds for f in everything if f.peak_reserved_bytes <= point.budget_bytes]
        assert point.plan is not None
        assert point.plan.figures.peak_reserved_bytes <= point.budget_bytes
        assert point.plan.figures.step_seconds <= min(fitting) * 1.005
        assert point.lower_bound_percent is not None
        assert point.lower_bound_percent <= point.plan.recompute_percent + 1e-6
        if point.peer is not None:
            assert point.plan.figures.step_seconds <= point.peer.figures.step_seconds


def test_the_ends_are_the_least_and_the_plain_step(result: SweepResult) -> None:
    first, last = result.points[0], result.points[-1]
    assert first.budget_bytes == min(c.figures.peak_reserved_bytes for c in (*result.front, *result.peers))
    assert last.plan is not None
    assert last.plan.techniques == ()
    assert last.budget_bytes == result.plain.peak_reserved_bytes
    times = [candidate.figures.step_seconds for candidate in result.front]
    assert times == sorted(times, reverse=True)


def test_several_bounds_at_once_are_those_one_by_one() -> None:
    graph = step(BLOCKS, {})
    costs = [float(op.flops) for op in graph.ops]
    peaks = [int(graph.peak_bytes * share) for share in (0.5, 0.7, 0.9)]
    assert lower_bounds(graph, costs, peaks) == [lower_bound(graph, costs, peak) for peak in peaks]


def test_it_is_shown_as_text_json_page_and_figure(
    result: SweepResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = to_text(sweep_text(result), width=110)
    assert text.count(" MiB") >= 2 * len(result.points)
    page = sweep_page(result, command="memfit fit a.py:b --sweep")
    assert page.startswith("<!doctype html>")
    assert "memfit fit a.py:b --sweep" in page
    assert "NaN" not in page
    assert sweep_png(result).startswith(b"\x89PNG")
    monkeypatch.setattr(sweep_module, "sweep", lambda *args, **settings: result)
    assert cli.main(["fit", "a.py:b", "--gpu", "a100", "--sweep", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [point["budget_bytes"] for point in value["points"]] == [p.budget_bytes for p in result.points]
    assert cli.main(["fit", "a.py:b", "--gpu", "a100", "--sweep", "--budget", "8GiB"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err


def test_one_budget_draws_no_front() -> None:
    with pytest.raises(UsageError, match="use 2 or more"):
        sweep("hf:gpt2", gpu="a100", points=1)
