"""Which of PyTorch's implementations of an optimizer runs: one parameter at a time, many at a time, or one
kernel.

``foreach`` (PyTorch's choice on CUDA) holds a temporary about as large as the parameters; ``fused`` and
``for-loop`` hold none, and ``fused`` is the fastest.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Implementation = Literal["fused", "foreach", "for-loop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_FLAGS: Mapping[Implementation, dict[str, bool]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}
_FUSED_MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What PyTorch's optimizers set on themselves when they are made with ``fused=True``."""


@dataclass(frozen=True, kw_only=True)
class OptimizerImplementation(Technique):
    """Runs an existing optimizer by another of its implementations; its state is kept.

    Args:
        implementation: ``"fused"``, ``"foreach"`` or ``"for-loop"``.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = OptimizerImplementation(implementation="fused").apply(model, optimizer)
        >>> optimizer.param_groups[0]["fused"]
        True
    """

    name: ClassVar[str] = "optimizer_implementation"

    implementation: Implementation = "fused"

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise UsageError(
                f"{self.name}: implementation must be one of {', '.join(IMPLEMENTATIONS)}, not "
                f"{self.implementation!r}"
            )

    def exactness(self, model: nn.Module) -> Exactness:
        return "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """What the optimizer's step makes for itself is gone; ``foreach`` makes about as much as the
        parameters are large."""
        from memfit.techniques.saving import Saving, saving_of

        steps = [op.index for op in graph.ops if op.phase == "optimizer"]
        made = [s for s in graph.storages if s.born in set(steps) and s.category == "temporary"]
        if self.implementation == "foreach":
            trained = {s.name for s in graph.storages if s.category == "gradient"}
            size = sum(
                s.size_bytes for s in graph.storages if s.category == "parameter" and s.name in trained
            )
            other = sum(s.size_bytes for s in made)
            note = "the step makes as much already" if other >= size else ""
            peak = min(0, graph.peak_bytes - graph.resting_bytes - size)
            return Saving(peak_bytes=0 if other >= size else peak, note=note)
        gone = {storage.id for storage in made}
        return saving_of(graph, (s for s in graph.storages if s.id not in gone))

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        if optimizer is None:
            raise UsageError(f"{self.name} changes the optimizer: apply(model, optimizer)")
        refuse_second(model, OptimizerImplementation)
        flags = _flags_for(optimizer, self.implementation)
        before = _flags_now(optimizer)
        marks = {mark: vars(optimizer)[mark] for mark in _FUSED_MARKS if mark in vars(optimizer)}
        _set_flags(optimizer, [flags] * len(optimizer.param_groups), flags)
        _set_marks(optimizer, dict.fromkeys(_FUSED_MARKS, True) if self.implementation == "fused" else {})
        reference = weakref.ref(optimizer)

        def undo() -> None:
            changed = reference()
            if changed is not None:
                _set_flags(changed, *before)
                _set_marks(changed, marks)

        return undo


def _flags_for(optimizer: Optimizer, implementation: Implementation) -> dict[str, bool]:
    """The flags that this optimizer knows of.

    Raises:
        UsageError: it has no such implementation, or not for these parameters.
    """
    kind = type(optimizer).__name__
    known = {flag: value for flag, value in _FLAGS[implementation].items() if flag in optimizer.defaults}
    needed = {"fused": "fused", "foreach": "foreach"}.get(implementation)
    if not known or (needed is not None and needed not in known):
        has = [name for name in ("fused", "foreach") if name in optimizer.defaults]
        raise UsageError(
            f"{kind} has no {implementation} implementation; it has {', '.join(has) or 'one only'}"
        )
    if implementation == "fused":
        _refuse_unfit_for_fused(optimizer, kind)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(f"{kind} with differentiable=True runs as a for-loop only")
    return known


def _refuse_unfit_for_fused(optimizer: Optimizer, kind: str) -> None:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    devices = set(_get_fused_kernels_supported_devices()) - ({"cuda"} if kind == "Adagrad" else set())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type not in devices or not parameter.is_floating_point():
                raise UsageError(
                    f"fused {kind} needs floating-point parameters on {', '.join(sorted(devices))}; one is "
                    f"{parameter.dtype} on {parameter.device.type}"
                )


def _flags_now(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    def of(values: Mapping[str, Any]) -> dict[str, Any]:
        return {flag: values[flag] for flag in ("fused", "foreach") if flag in values}

    return [of(group) for group in optimizer.param_groups], of(optimizer.defaults)


def _set_flags(optimizer: Optimizer, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    for group, flags in zip(optimizer.param_groups, groups, strict=False):
        group.update(flags)
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            _move_step(optimizer.state.get(parameter), parameter, on_device)
    optimizer.defaults.update(defaults)


def _move_step(state: dict[str, Any] | None, parameter: Any, on_device: bool) -> None:
    """Counters of steps live beside the parameter for fused and capturable optimizers, else on the CPU."""
    import torch

    step = state.get("step") if state else None
    if state is not None and isinstance(step, torch.Tensor):
        state["step"] = step.to(parameter.device if on_device else "cpu")


def _set_marks(optimizer: Optimizer, marks: Mapping[str, Any]) -> None:
    for mark in _FUSED_MARKS:
        vars(optimizer).pop(mark, None)
    vars(optimizer).update(marks)
