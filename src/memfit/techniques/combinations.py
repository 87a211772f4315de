"""Which techniques cannot be applied together, and why: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memfit.core.errors import UsageError
from memfit.techniques.base import Technique, applied_techniques

if TYPE_CHECKING:
    from torch import nn

Kind = Callable[[Technique, "nn.Module"], bool]


def _named(*names: str) -> Kind:
    return lambda technique, model: technique.name in names


def _cuts(technique: Technique, model: nn.Module) -> bool:
    return technique.name == "micro_batching" and getattr(technique, "micro_batches", 1) > 1


def _scales_or_clips(technique: Technique, model: nn.Module) -> bool:
    if technique.name != "mixed_precision":
        return False
    from memfit.techniques.mixed_precision import best_precision, device_type

    precision = getattr(technique, "precision", "auto")
    low = best_precision(device_type(model)) if precision == "auto" else precision
    return low == "fp16" or getattr(technique, "max_grad_norm", None) is not None


def _holds_bf16_weights(technique: Technique, model: nn.Module) -> bool:
    return technique.name == "mixed_precision" and getattr(technique, "weights", "") == "bf16"


_IN_BACKWARD, _OFFLOADED = _named("optimizer_in_backward"), _named("offloaded_optimizer_state")
_APART: tuple[tuple[Kind, Kind, str], ...] = (
    (_IN_BACKWARD, _cuts, "each backward pass steps, so the gradients of micro-batches cannot be added up"),
    (_IN_BACKWARD, _scales_or_clips, "it steps before gradients can be unscaled or clipped; use bf16 alone"),
    (_IN_BACKWARD, _holds_bf16_weights, "the step in the backward pass would round small updates away"),
    (_IN_BACKWARD, _OFFLOADED, "both run the optimizer's step, one on the device, one on the host"),
    (_OFFLOADED, _holds_bf16_weights, "bf16 weights keep what is beside them on the device"),
    (_OFFLOADED, _named("low_memory_optimizer"), "small states stay on the device, whose kernels step them"),
    (
        _named("memory_compression"),
        _named("activation_offload"),
        "both keep what blocks save; ActivationOffload(compression_algorithm=…) compresses what it moves",
    ),
)


def refuse_combination(model: nn.Module, technique: Technique) -> None:
    """UsageError when a technique is applied to ``model`` that ``technique`` cannot go with."""
    for applied in applied_techniques(model):
        for one, other, reason in _APART:
            both = (applied, technique)
            for a, b in (both, both[::-1]):
                if one(a, model) and other(b, model):
                    raise UsageError(
                        f"{technique.name} does not go with {applied.name}, which is applied: {reason}; "
                        "memfit.undo(model) takes that back"
                    )
