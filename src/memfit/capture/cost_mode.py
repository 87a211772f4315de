"""Sums what a running step costs without recording it: cheap enough for every candidate plan."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.attribution import phase_of
from memfit.capture.costs import roofline_seconds
from memfit.capture.operators import OpCall
from memfit.core.devices import GPU


class CostMode(TorchDispatchMode):
    """Sums FLOPs and predicted seconds of the operators that run under it, by phase.

    Examples:
        >>> import torch
        >>> from memfit.core.devices import find_gpu
        >>> costs = CostMode(find_gpu("a100-80gb"), device="cpu")
        >>> with costs:
        ...     _ = torch.ones(64, 64) @ torch.ones(64, 64)
        >>> costs.flops
        524288
    """

    def __init__(self, gpu: GPU, *, device: str = "cuda") -> None:
        super().__init__()
        self.gpu, self.device_type = gpu, device
        self.phase = "forward"
        self.flops_by_phase: dict[str, int] = {}
        self.seconds_by_phase: dict[str, float] = {}
        self.op_count = 0

    @property
    def flops(self) -> int:
        """Floating-point operations so far, recomputation included."""
        return sum(self.flops_by_phase.values())

    @property
    def seconds(self) -> float:
        """Predicted seconds so far."""
        return sum(self.seconds_by_phase.values())

    def on_phase(self, phase: str) -> None:
        """To be called as phases begin; the backward pass and recomputation are recognised in any case."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.count(func, args, kwargs, out)
        return out

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operator that has run, for whoever sees it in another way than by this mode."""
        if func.namespace == "prim":
            return
        call = OpCall(func, args, kwargs, out)
        if any(tensor.device.type == self.device_type for tensor in (*call.operands, *call.results)):
            self._add(call)

    def _add(self, call: OpCall) -> None:
        flops, share, moved, dtype = call.work()
        phase = phase_of(self.phase)
        self.op_count += 1
        self.flops_by_phase[phase] = self.flops_by_phase.get(phase, 0) + flops
        seconds = roofline_seconds(call.facts.name, round(flops * share), moved, dtype, self.gpu)
        self.seconds_by_phase[phase] = self.seconds_by_phase.get(phase, 0.0) + seconds
