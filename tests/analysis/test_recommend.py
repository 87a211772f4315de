"""Advice is measured, ranked and can be applied; techniques are found by their own fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from memfit import OptimizationRecommender, Plan, UsageError, Workload, undo
from memfit.analysis.analyses import analyze
from memfit.analysis.candidates import candidate_settings, settings_to_try
from memfit.analysis.subject import Subject
from memfit.capture.step import build_step
from memfit.capture.tracker import StepTracker
from memfit.techniques import (
    TECHNIQUES,
    GradientCheckpointing,
    MicroBatching,
    OptimizerImplementation,
    applied_techniques,
)

Kind = Literal["a", "b", "c"]


def workload():
    """Eight blocks whose activations are most of the step."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    return Workload(
        name="blocks",
        model=lambda: nn.Sequential(*(Block() for _ in range(8))),
        batch=lambda: torch.randn(8192, 64),
        loss=lambda model, batch: model(batch).square().mean(),
    )


@dataclass(frozen=True, kw_only=True)
class Made:
    """A technique that this project has never heard of."""

    name: ClassVar[str] = "made"

    on: bool = True
    kind: Kind = "a"
    parts: int = 4
    every: int | None = None
    limit: int = 100_000
    share: float | None = None
    rate: float = 0.1
    names: tuple[str, ...] = field(default=())

    def __post_init__(self):
        if self.parts == 8:
            raise UsageError("made: 8 is too many")

    def to_settings(self):
        given = {key: value for key, value in vars(self).items() if value != getattr(Made, key, ())}
        return {"technique": "made", **given}


def test_settings_of_an_unknown_technique_are_read_off_its_fields():
    tried = settings_to_try(Made)
    assert tried[0] == {"technique": "made"}
    changed = [{key: value for key, value in one.items() if key != "technique"} for one in tried[1:]]
    assert changed == [{"on": False}, {"kind": "b"}, {"kind": "c"}, {"parts": 2}, {"every": 2}]


def test_a_technique_may_name_its_settings_itself():
    @dataclass(frozen=True, kw_only=True)
    class Own(Made):
        @classmethod
        def candidates(cls):
            return [{"parts": 3}, {"parts": 5}]

    assert [one["parts"] for one in settings_to_try(Own)] == [3, 5]


def test_every_technique_of_the_table_can_be_tried():
    assert set(candidate_settings()) == set(TECHNIQUES)
    for name, tried in candidate_settings().items():
        assert tried, name
        for settings in tried:
            assert TECHNIQUES[name].from_settings(settings).to_settings() == settings


@pytest.fixture(scope="module")
def analysed():
    """Every analysis of the workload, with three techniques to try, on whatever engine is here."""
    kinds = (GradientCheckpointing, MicroBatching, OptimizerImplementation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfit.techniques.TECHNIQUES", {kind.name: kind for kind in kinds})
        subject = Subject.of(workload(), gpu="rtx3060-12gb", budget="60MiB", allow="reordered")
        return analyze(subject)


@pytest.fixture
def found(analysed):
    return analysed.results["recommendations"]


def test_all_analyses_of_a_workload_agree(analysed):
    memory, performance, limits, advice = analysed.results.values()
    assert not analysed.skipped and analysed.subject.oracle is None
    graph = analysed.subject.graph
    assert memory.peak_bytes == graph.peak_bytes and memory.capacity_bytes == 60 << 20
    assert performance.seconds == pytest.approx(advice.plain.step_seconds)
    assert performance.flops == graph.flops == advice.plain.flops
    assert limits.limit.kind == "memory_capacity"
    assert advice.plain.peak_requested_bytes >= graph.peak_bytes  # and the libraries' workspaces


def test_advice_is_ranked_with_its_saving_and_cost(found):
    names = [row.plan.techniques[0]["technique"] for row in found.advice]
    assert {"gradient_checkpointing", "micro_batching"} <= set(names)
    assert not found.plain_fits
    fits = [row.fits for row in found.advice]
    assert fits == sorted(fits, reverse=True)
    for row in found.advice:
        planned = row.plan.planned
        assert row.saving_bytes == found.plain.peak_reserved_bytes - planned.peak_reserved_bytes > 0
        assert row.cost_seconds == pytest.approx(planned.step_seconds - found.plain.step_seconds)


def test_what_does_not_help_is_said_with_why(found):
    reasons = {row.settings["technique"]: row.reason for row in found.rejected}
    assert "the peak stays: it is in the" in reasons["optimizer_implementation"]


def test_several_together_fit_where_none_does_alone(found):
    assert not any(row.fits for row in found.advice)
    together = found.together
    assert {settings["technique"] for settings in together.plan.techniques} == {
        "gradient_checkpointing", "micro_batching",
    }  # fmt: skip
    assert together.fits and together.exactness == "reordered"
    assert together.plan.planned.peak_reserved_bytes <= 60 << 20


def test_advice_is_applied_by_one_call_and_saves_what_a_real_step_shows(found, tmp_path):
    row = next(row for row in found.advice if row.name == "gradient checkpointing")
    step = build_step(workload(), device="cpu")
    for _ in range(2):
        step.run()
    plain = StepTracker(step).run().peak_bytes
    model, optimizer = row.apply(step.model, step.optimizer)
    assert (model, optimizer) == (step.model, step.optimizer)
    assert applied_techniques(model) == (GradientCheckpointing(),)
    saved = plain - StepTracker(step).run().peak_bytes
    assert saved == pytest.approx(row.saving_requested_bytes, rel=0.1)
    undo(model)
    path = row.plan.save(tmp_path / "plan.json")
    assert Plan.load(path).techniques == ({"technique": "gradient_checkpointing"},)


def test_it_is_text_and_json(found):
    assert "Recommendations\n  The plain step reserves" in str(found)
    assert "saves" in str(found.advice[0]) and "What does not help, and why" in str(found)
    data = json.loads(json.dumps(found.to_json()))
    assert Plan.from_json(data["recommendations"][0]["plan"]).techniques == found.advice[0].plan.techniques


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workload": "hf:gpt2"}, "recommendations are for a GPU"),
        ({"workload": "hf:gpt2", "gpu": "a100", "allow": "any"}, "allow='any': use one of exact"),
    ],
)
def test_impossible_questions(arguments, said):
    with pytest.raises(UsageError, match=said):
        OptimizationRecommender(**arguments)


def test_a_trace_alone_cannot_be_tried_on():
    from memfit.core.trace import TraceBuilder

    with pytest.raises(UsageError, match="give a Workload"):
        OptimizationRecommender(TraceBuilder().build(), gpu="a100")
