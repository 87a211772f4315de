"""Where nothing that keeps the training the same fits: what other trainings would need. Advice, not plans.

Each way is run like a plan, on the leanest schedule (every block recomputed): its figure is a measured peak.
What it would do to results is said by its grade, and nothing of it is chosen for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.core.errors import MemfitError
from memfit.planning.bench import ModelFacts, Oracle
from memfit.planning.figures import Advice, Settings
from memfit.planning.oracle import StepOracle
from memfit.planning.schedules import checkpointing
from memfit.planning.sizes import Dimension, size_of, sized

SMALL_STATE = {"technique": "low_memory_optimizer", "kind": "adamw8bit"}
BF16 = {"technique": "mixed_precision", "precision": "bf16", "weights": "bf16"}
WAYS: tuple[tuple[str, str, tuple[Settings, ...]], ...] = (
    ("an optimizer with 8-bit states", "approximate", (SMALL_STATE,)),
    ("the optimizer's step in the backward pass", "reordered", ({"technique": "optimizer_in_backward"},)),
    ("the optimizer's state in host memory", "reordered", ({"technique": "offloaded_optimizer_state"},)),
    ("weights and states in bf16", "approximate", (BF16,)),
    ("adapters in place of the weights (LoRA, rank 8)", "changes training", ({"technique": "lora"},)),
    ("adapters over 4-bit weights (QLoRA, rank 8)", "changes training", ({"technique": "qlora"},)),
)
HALVINGS = 6


def advise(oracle: Oracle, facts: ModelFacts, budget_bytes: int) -> tuple[Advice, ...]:
    """What each way would reserve, those that cannot be applied left out; and the batch and the sequence that
    would fit, halved as often as needed, where the workload's text names them."""
    full = checkpointing(facts.blocks, ((),) * len(facts.blocks))
    lean: tuple[Settings, ...] = full
    if facts.expandable_segments is not None:
        lean = (*full, {"technique": "allocator_settings", "expandable_segments": True})
    found = []
    for what, grade, settings in WAYS:
        techniques = (*full, *settings, *lean[len(full) :])
        peaks = oracle.evaluate(techniques)
        if peaks.failure is None:
            found.append(_advice(what, grade, techniques, peaks.reserved_bytes, budget_bytes))
    if isinstance(oracle, StepOracle):
        found += _smaller(oracle, facts, lean, budget_bytes)
    return tuple(found)


def _smaller(
    oracle: StepOracle, facts: ModelFacts, lean: Sequence[Settings], budget_bytes: int
) -> list[Advice]:
    """The first half, quarter … of the batch and of the sequence that fits."""
    reference = oracle.workload
    if not str(reference.get("spec", "")).startswith(("hf:", "tv:")):
        return []
    found = []
    with oracle.open("memfit.planning.evaluate_sizes:SizedSession") as session:
        dimensions: tuple[Dimension, ...] = ("batch", "seq")
        for dimension in dimensions:
            size = size_of(reference, dimension, facts)
            reserved = _first_that_fits(session, reference, dimension, size, lean, budget_bytes)
            if reserved is not None:
                what = f"{dimension}={reserved[0]} instead of {size}"
                found.append(_advice(what, "changes training", tuple(lean), reserved[1], budget_bytes))
    return found


def _first_that_fits(
    session: Any,
    reference: Any,
    dimension: Dimension,
    size: int | None,
    lean: Sequence[Settings],
    budget_bytes: int,
) -> tuple[int, int] | None:
    for halving in range(1, HALVINGS + 1):
        smaller = (size or 0) >> halving
        if smaller < 1:
            return None
        try:
            peaks = session.call(
                "evaluate_at", workload=sized(reference, dimension, smaller), techniques=list(lean)
            )
        except MemfitError:
            return None  # advice is worth no failure
        if peaks.get("failure") is None and peaks["reserved_bytes"] <= budget_bytes:
            return smaller, int(peaks["reserved_bytes"])
    return None


def _advice(
    what: str, grade: Any, techniques: tuple[Settings, ...], reserved_bytes: int, budget_bytes: int
) -> Advice:
    return Advice(
        what=what,
        exactness=grade,
        techniques=techniques,
        peak_reserved_bytes=reserved_bytes,
        fits=reserved_bytes <= budget_bytes,
    )
