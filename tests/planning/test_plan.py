"""Plans as values and as files: what is read back, what is refused, and what applying one does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.core.errors import InputError, UsageError
from memfit.planning.figures import StepFigures
from memfit.planning.plan import Plan, parameter_shapes
from memfit.techniques import applied_techniques

FIGURES = StepFigures(
    peak_requested_bytes=100,
    peak_allocated_bytes=512,
    peak_reserved_bytes=2 << 20,
    step_seconds=0.25,
    flops=1e9,
    peak_by_category={"parameter": 64, "activation": 36},
)


def a_plan(**changes: Any) -> Plan:
    plan = Plan(
        workload="toy",
        gpu="rtx3060-12gb",
        budget_bytes=8 << 30,
        techniques=({"technique": "gradient_checkpointing", "blocks": {"0": [], "1": ["linear:0"]}},),
        exactness="exact",
        plain=FIGURES,
        planned=FIGURES,
        recompute_percent=12.5,
        lower_bound_percent=11.0,
        torch="2.14.1",
    )
    return dataclasses.replace(plan, **changes)


def a_model() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    return nn.Sequential(block(), block(), nn.Linear(8, 2))


def test_a_plan_reads_back_equal(tmp_path: Path) -> None:
    plan = a_plan()
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


def test_saving_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("something of the user's")
    a_plan().save(path)
    assert Plan.load(path).workload == "toy"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def broken(change: Callable[[dict[str, Any]], Any]) -> str:
    data = a_plan().to_json()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ":1: not JSON"),
        ("[1]", "a JSON object, not list"),
        (broken(lambda d: d.update(schema_version=99)), "schema_version is 99"),
        (broken(lambda d: d.pop("gpu")), "key 'gpu' is missing"),
        (
            broken(lambda d: d.update(budget_bytes="8GiB")),
            "key 'budget_bytes': '8GiB' is not a number of bytes",
        ),
        (broken(lambda d: d.update(exactness="roughly")), "key 'exactness': 'roughly' is none of exact"),
        (broken(lambda d: d.update(techniques=[{"technique": "magic"}])), "technique 'magic' is unknown"),
        (broken(lambda d: d.update(techniques={})), "key 'techniques': must be a list, not dict"),
        (broken(lambda d: d.update(techniques=[{}])), "key 'techniques' lacks 'technique'"),
        (broken(lambda d: d["plain"].pop("peak_reserved_bytes")), "key 'plain' lacks 'peak_reserved_bytes'"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.json: cannot read the plan"):
        Plan.load(tmp_path / "nothing.json")


def test_apply_gives_back_what_it_was_given() -> None:
    model = a_model()
    assert a_plan().apply(model) is model
    optimizer = torch.optim.AdamW(a_model().parameters())
    second = a_model()
    assert a_plan().apply(second, optimizer) == (second, optimizer)


def test_an_applied_plan_changes_no_gradient() -> None:
    torch.manual_seed(0)
    plain, planned = a_model(), a_model()
    planned.load_state_dict(plain.state_dict())
    a_plan().apply(planned)
    batch = torch.randn(4, 8)
    for model in (plain, planned):
        model(batch).square().mean().backward()
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_model_without_the_blocks_is_refused_and_left_alone() -> None:
    model = a_model()
    plan = a_plan(techniques=({"technique": "gradient_checkpointing", "blocks": {"0": [], "layers.7": []}},))
    with pytest.raises(UsageError, match=r"layers\.7"):
        plan.apply(model)
    assert applied_techniques(model) == ()


def test_when_a_later_technique_refuses_the_earlier_ones_are_taken_back() -> None:
    model = a_model()
    plan = a_plan(
        techniques=(*a_plan().techniques, {"technique": "chunked_cross_entropy", "layer": "missing"})
    )
    with pytest.raises(UsageError):
        plan.apply(model)
    assert applied_techniques(model) == ()


def test_micro_batches_are_views_whose_weights_add_up_to_one() -> None:
    plan = a_plan(techniques=({"technique": "micro_batching", "micro_batches": 3},))
    batch = {"x": torch.arange(8.0), "y": torch.arange(8)}
    pieces = list(plan.micro_batches(batch))
    assert sum(weight for _, weight in pieces) == pytest.approx(1.0)
    assert torch.equal(torch.cat([piece["x"] for piece, _ in pieces]), batch["x"])
    tokens = list(plan.micro_batches(batch, loss_weight=lambda piece: float(piece["y"].sum())))
    assert [weight for _, weight in tokens] == pytest.approx([float(p["y"].sum()) / 28 for p, _ in tokens])


def test_a_plan_that_does_not_cut_gives_the_batch_as_it_is() -> None:
    batch = torch.zeros(4)
    assert [(piece is batch, weight) for piece, weight in a_plan().micro_batches(batch)] == [(True, 1.0)]


def test_a_plan_for_another_model_says_what_differs(tmp_path: Path) -> None:
    plan = a_plan(fingerprint=parameter_shapes(a_model()))
    plan = Plan.load(plan.save(tmp_path / "plan.json"))
    fitting = plan.apply(a_model())
    assert applied_techniques(fitting)
    wider = a_model()
    wider[2] = nn.Linear(8, 3, bias=False)
    with pytest.raises(UsageError, match=r"2\.weight is 3x8 here and was 2x8; 2\.bias is missing"):
        plan.apply(wider)
    assert not applied_techniques(wider)
    assert a_plan().apply(wider) is wider  # a plan from before fingerprints
    with pytest.raises(InputError, match="fingerprint"):
        Plan.from_json({**plan.to_json(), "fingerprint": [1]})
