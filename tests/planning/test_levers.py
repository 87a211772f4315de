"""Levers beside recomputation: which are tried, what they are expected to take, and plans that use them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from imitation import MIB, Imitation, gpu, reserved, step

from memfit.capture.graph import StepGraph
from memfit.core.errors import CannotRunHere
from memfit.core.exactness import EXACTNESS_ORDER, allowed
from memfit.core.workload import Workload
from memfit.planning import FitResult, Plan, plan
from memfit.planning.figures import Settings
from memfit.planning.lever_search import prospects, worth_a_run
from memfit.planning.lever_table import LEVER_KINDS, combinations
from memfit.planning.plan import apply_settings
from memfit.planning.schedules import NO_LEVER
from memfit.planning.search import Search
from memfit.planning.verify import compare
from memfit.techniques import technique_from_settings, undo_all

MODELS = Path(__file__).with_name("tiny_models.py")


def search(oracle: Imitation, budget: int, **more: Any) -> Any:
    return Search(oracle=oracle, gpu=gpu(), budget_bytes=budget, **more).run()


def floor_of(oracle: Imitation) -> int:
    """What every block recomputed reserves."""
    return reserved(step(oracle.blocks, {f"h.{i}": () for i in range(oracle.blocks)}).peak_bytes)


def test_offloading_is_left_where_recomputation_is_cheap_and_comes_where_it_is_dear() -> None:
    """The gelu alone is run again for next to nothing; the products take longer than copies beside them."""
    oracle = Imitation(offloads=True)
    plain = reserved(step(6, {}).peak_bytes)
    little = search(oracle, plain - 2 * MIB)
    assert not [s for s in little.chosen.techniques if s["technique"] == "activation_offload"]
    assert not [asked for asked in oracle.asked for s in asked if s["technique"] == "activation_offload"]
    much = search(oracle, floor_of(oracle) + 2 * MIB)
    names = {s["technique"] for s in much.chosen.techniques}
    assert "activation_offload" in names
    without = search(Imitation(), floor_of(oracle) + 2 * MIB)
    assert much.chosen.final.figures.step_seconds < without.chosen.final.figures.step_seconds
    assert much.chosen.lever.host_bytes > 0
    assert any("host memory" in note for note in much.notes)


def test_no_host_memory_means_that_nothing_goes_there() -> None:
    oracle = Imitation(offloads=True)
    found = search(oracle, floor_of(oracle) + 2 * MIB, host_budget_bytes=0)
    assert found.chosen is not None
    assert found.chosen.lever.host_bytes == 0
    assert all(s["technique"] != "activation_offload" for asked in oracle.asked for s in asked)


class Bare(Imitation):
    """Packages that levers need are missing."""

    def graph(self, techniques: Sequence[Settings]) -> StepGraph:
        if techniques and techniques[0]["technique"] != "gradient_checkpointing":
            raise CannotRunHere(f"{techniques[0]['technique']} needs what is not installed")
        return super().graph(techniques)


def test_a_lever_that_cannot_run_here_is_a_note() -> None:
    found = search(Bare(), floor_of(Bare()) - 2 * MIB, allow="approximate")
    assert found.chosen is None
    assert any("is not installed" in note for note in found.notes)
    assert len(found.notes) == len(set(found.notes))


def test_the_grade_of_each_lever_is_that_of_its_technique_on_a_gpu() -> None:
    with torch.device("meta"):
        model = tiny_models.TinyGPT(32, 4)
    for kind in LEVER_KINDS:
        assert technique_from_settings(kind.settings).exactness(model) == kind.exactness, kind.name


@pytest.mark.parametrize("allow", EXACTNESS_ORDER[:3])
def test_sets_of_levers_keep_to_the_grade_and_go_together(allow: Any) -> None:
    model = tiny_models.TinyGPT(32, 4)
    small_state = any(map(importlib.util.find_spec, ("bitsandbytes", "torchao")))
    for kinds in combinations(allow):
        if not small_state and any(kind.settings["technique"] == "low_memory_optimizer" for kind in kinds):
            continue
        assert all(allowed(kind.exactness, allow) for kind in kinds)
        optimizer = torch.optim.AdamW(model.parameters())
        order = sorted(kinds, key=lambda kind: kind.axis != "parameters")
        apply_settings([_on_cpu(kind.settings) for kind in order], model, optimizer)
        assert len(undo_all(model)) == len(kinds)


def _on_cpu(settings: Settings) -> Settings:
    return {**settings, "to": "disk"} if settings["technique"] == "parameter_offload" else settings


def test_only_levers_that_may_be_faster_are_worth_a_run() -> None:
    graph = step(6, {})
    seconds = [1e-3] * len(graph.ops)
    common: dict[str, Any] = {"blocks": [f"h.{i}" for i in range(6)], "gpu": gpu()}
    steps = [(NO_LEVER, graph, seconds)]
    roomy = prospects(steps, allow="approximate", budget_bytes=graph.peak_bytes, best_seconds=1e-9, **common)
    assert roomy == []
    tight = prospects(
        steps, allow="reordered", budget_bytes=graph.peak_bytes, best_seconds=float("inf"), **common
    )
    expected = [p.expected_seconds for p in worth_a_run(tight)]
    assert expected == sorted(expected)
    assert all(p.floor_seconds <= p.expected_seconds for p in tight)
    hopeless = prospects(steps, allow="reordered", budget_bytes=1, best_seconds=float("inf"), **common)
    (leanest,) = worth_a_run(hopeless)
    assert leanest.least_bytes == min(p.least_bytes for p in hopeless)


@pytest.mark.parametrize(
    ("techniques", "exactness"),
    [
        ([{"technique": "optimizer_in_backward"}], "reordered"),
        ([{"technique": "activation_offload", "blocks": ["blocks.0", "blocks.2"]}], "exact"),
        ([{"technique": "parameter_offload"}, {"technique": "offloaded_optimizer_state"}], "reordered"),
    ],
)
def test_what_leaves_the_device_or_steps_early_is_compared_for_real(
    techniques: Sequence[Settings], exactness: Any
) -> None:
    """On the CPU a file stands for the host, and gradients are seen before they are used up: all bitwise."""
    late = {"technique": "gradient_checkpointing", "blocks": {"blocks.2": [], "blocks.3": ["linear:0"]}}
    first = [s for s in techniques if s["technique"] == "parameter_offload"]
    rest = [s for s in techniques if s not in first]
    verified = compare(tiny_models.gpt(), [*first, late, *rest], exactness)
    assert verified.passed
    assert verified.bitwise
    offloads = any("offload" in s["technique"] and "optimizer" not in s["technique"] for s in techniques)
    assert offloads == ("a file in place of host memory" in verified.scale)


def adam_gpt() -> Workload:
    """Adam's states are most of what it needs."""
    return dataclasses.replace(
        tiny_models.gpt(),
        name="GPT of few tokens",
        model=lambda size="full": tiny_models.TinyGPT(*((384, 3) if size == "full" else (32, 3))),
        batch=lambda size="full": torch.randint(0, 1024, (2, 64) if size == "full" else (2, 16)),
    )


@pytest.mark.dryrun
def test_states_in_host_memory_fit_where_nothing_fitted(tmp_path: Path) -> None:
    """Below parameters, gradients and states no recomputation helps; the plan is saved and applied."""
    held = 4 * sum(p.nbytes for p in tiny_models.TinyGPT(384, 3).parameters())
    budget = int(held * 0.85)
    spec = f"{Path(__file__)}:adam_gpt"
    result: FitResult = plan(spec, gpu="rtx3060-12gb", budget=budget, allow="reordered")
    assert result.fits
    assert result.planned is not None
    assert result.planned.peak_reserved_bytes <= budget
    assert result.lower_bound_percent is None
    assert result.verified is not None
    assert result.verified.passed
    made = result.plan
    assert made is not None
    assert Plan.load(made.save(tmp_path / "plan.json")) == made
    if result.planned.host_bytes:
        assert any("host memory" in note for note in result.notes)


def test_names_of_levers_are_told_apart() -> None:
    assert len({kind.name for kind in LEVER_KINDS}) == len(LEVER_KINDS)
    for one, other in itertools.permutations(LEVER_KINDS, 2):
        assert (one.name in other.apart) <= (other.name in one.apart or one.axis != other.axis)
