"""Tries techniques on for fit, in a process on the made-up GPU or the imitated one. Child side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.capture.graph import StepGraph
from memfit.capture.step import build_step
from memfit.capture.workloads import from_reference
from memfit.core.errors import MemfitError
from memfit.planning.evaluate import device_of
from memfit.planning.figures import Settings
from memfit.techniques import Technique, technique_from_settings, undo


def grades(
    workload: Mapping[str, Any],
    engine: str,
    target: Mapping[str, Any],
    candidates: Sequence[Settings],
    graph: Mapping[str, Any],
    seed: int = 0,
) -> list[dict[str, Any]]:
    """For each candidate how exact it is on the workload's model, or why it cannot be applied to it.

    Args:
        graph: the plain step, as `StepGraph` JSON, for the techniques' own estimates.

    Returns:
        ``{"exactness": …, "reason": None, "estimate": […]}``, in order. ``reason`` says why it cannot be
        applied; ``exactness`` is None where it could not be told then, ``estimate`` where there is none.
    """
    step_graph = StepGraph.from_json(graph)
    made = from_reference(workload)
    with device_of(engine, target) as (device, _):
        step = build_step(made, device=device, seed=seed)
        found: list[dict[str, Any]] = []
        for settings in candidates:
            grade: dict[str, Any] = {"exactness": None, "reason": None, "estimate": None}
            found.append(grade)
            try:
                technique = technique_from_settings(settings)
                grade["exactness"] = technique.exactness(step.model)
                technique.apply(step.model, step.optimizer)
                undo(step.model)
                grade["estimate"] = _estimate(technique, step_graph, step.model)
            except MemfitError as refusal:
                grade["reason"] = str(refusal)
            except (
                Exception
            ) as bug:  # of one technique, maybe the user's own: the others go on, on a new step
                grade["reason"] = f"{type(bug).__name__}: {bug}"
                step = build_step(made, device=device, seed=seed)
        return found


def _estimate(technique: Technique, graph: StepGraph, model: Any) -> list[int] | None:
    """Peak bytes, resting bytes and FLOPs that the technique expects to save or cost."""
    try:
        saving = technique.estimate(graph, model)
    except MemfitError:
        return None
    return [int(saving.peak_bytes), int(saving.resting_bytes), int(saving.extra_flops)]
