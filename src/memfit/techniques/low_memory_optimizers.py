"""Optimizers whose state is small: 8-bit and 4-bit moments, factored moments, paged memory."""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.techniques.base import Technique, Undo, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph, Storage
    from memfit.techniques.saving import Saving

Kind = Literal["adamw8bit", "adamw4bit", "paged", "lion8bit", "adafactor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Backend = Literal["auto", "bitsandbytes", "torchao"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

NO_GAIN = 0.05
"""A saving below this share of the step's peak is called no gain."""

_MADE_BY: Mapping[tuple[str, str], tuple[str, str]] = {
    ("adamw8bit", "bitsandbytes"): ("{}8bit", "bitsandbytes:8"),
    ("paged", "bitsandbytes"): ("Paged{}8bit", "bitsandbytes:8"),
    ("lion8bit", "bitsandbytes"): ("Lion8bit", "bitsandbytes:lion8"),
    ("adamw8bit", "torchao"): ("{}8bit", "torchao:8"),
    ("adamw4bit", "torchao"): ("{}4bit", "torchao:4"),
    ("adafactor", "torch"): ("Adafactor", "adafactor"),
}
"""By kind and back-end: the class (``{}`` is Adam or AdamW) and the key of its bytes."""
_MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim", "torch": "torch.optim"}


@dataclass(frozen=True, kw_only=True)
class LowMemoryOptimizer(Technique):
    """Turns an optimizer into one whose state is small, in place: schedulers and references go on working.

    Tensors of fewer than 4096 elements stay 32 bit. Moments that are there already are quantized, and undo
    brings them back to 32 bit, but for Adafactor and Lion, which start anew.

    Args:
        kind: ``"adamw8bit"``, ``"adamw4bit"`` (from Adam or AdamW); ``"paged"`` (8 bit, in memory that the
            driver moves to the host when the GPU is full); ``"lion8bit"`` and ``"adafactor"``, which are
            other optimizers.
        backend: ``"bitsandbytes"`` or ``"torchao"`` (``pip install 'memfit[quant]'``); ``"auto"`` takes what
            is installed, bitsandbytes first.
        compiled: whether torchao compiles its step; ``None``: on CUDA only.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = LowMemoryOptimizer(kind="adafactor").apply(model, optimizer)
        >>> type(optimizer).__name__
        'Adafactor'
    """

    name: ClassVar[str] = "low_memory_optimizer"

    kind: Kind = "adamw8bit"
    backend: Backend = "auto"
    compiled: bool | None = None

    def __post_init__(self) -> None:
        for key, allowed in (("kind", KINDS), ("backend", BACKENDS)):
            if getattr(self, key) not in allowed:
                raise UsageError(
                    f"{self.name}: {key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}"
                )
        if self.backend != "auto" and (self.kind, self.backend) not in _MADE_BY:
            has = [backend for kind, backend in _MADE_BY if kind == self.kind]
            raise UsageError(f"{self.name}: {self.kind} comes from {' or '.join(has)}, not {self.backend}")

    def exactness(self, model: nn.Module) -> Exactness:
        """``approximate`` for quantized moments; Lion and Adafactor are other optimizers."""
        return "changes training" if self.kind in ("lion8bit", "adafactor") else "approximate"

    def state_bytes(self, model: nn.Module) -> int:
        """Bytes of the optimizer's state for the parameters of ``model`` that train, to the byte."""
        from memfit.techniques.low_memory_optimizers_bytes import BYTES, Shape

        key = _MADE_BY[self.kind, self._backend(missing_is_fine=True)][1]
        return BYTES[key](
            Shape(shape=tuple(p.shape), itemsize=p.element_size())
            for p in model.parameters()
            if p.requires_grad
        )

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Exact state bytes; says when the saving is too small to matter. Needs the model, for its shapes."""
        from memfit.techniques.saving import saving_of

        if model is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model for its shapes")
        before = sum(s.size_bytes for s in graph.storages if s.category == "optimizer_state")
        after = self.state_bytes(model)
        saving = saving_of(graph, _without_state(graph), extra_resting_bytes=after)
        return replace(saving, note=_gain(self, graph, model, saving.peak_bytes, before, after))

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques import low_memory_optimizers_states as states
        from memfit.techniques.combinations import refuse_combination

        refuse_second(model, LowMemoryOptimizer)
        refuse_combination(model, self)
        if optimizer is None:
            raise UsageError(f"{self.name} changes the optimizer: apply(model, optimizer)")
        kind = self._class_for(optimizer)
        _refuse_unfit(self, model, optimizer)
        made = states.made_like(kind, optimizer)
        take_back = states.become(optimizer, made, compiled=self.compiled)
        reference = weakref.ref(optimizer)

        def undo() -> None:
            if reference() is not None:
                take_back(reference())

        return undo

    def _backend(self, *, missing_is_fine: bool = False) -> str:
        """The back-end that makes this kind: the one that is asked for, or the first that is installed."""
        able = [backend for kind, backend in _MADE_BY if kind == self.kind]
        wanted = [backend for backend in able if self.backend in ("auto", backend)]
        there = [backend for backend in wanted if importlib.util.find_spec(backend) is not None]
        if there or missing_is_fine:
            return (there or wanted)[0]
        raise CannotRunHere(
            f"{self.name}: {self.kind} needs {' or '.join(wanted)}, which is not installed: "
            "pip install 'memfit[quant]'"
        )

    def _class_for(self, optimizer: Optimizer) -> type[Optimizer]:
        import torch

        backend = self._backend()
        pattern, _ = _MADE_BY[self.kind, backend]
        if "{}" in pattern and not isinstance(optimizer, torch.optim.Adam):
            raise UsageError(
                f"{self.name}: {self.kind} replaces Adam or AdamW, not {type(optimizer).__name__}; "
                "adafactor and lion8bit replace any optimizer"
            )
        decoupled = all(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
        name = pattern.format("AdamW" if decoupled else "Adam")
        kind: type[Optimizer] = getattr(importlib.import_module(_MODULES[backend]), name)
        return kind


def _refuse_unfit(low: LowMemoryOptimizer, model: nn.Module, optimizer: Optimizer) -> None:
    import torch

    for group in optimizer.param_groups:
        for flag in ("maximize", "amsgrad", "differentiable"):
            if group.get(flag):
                raise UsageError(f"{low.name}: {low.kind} has no {flag}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise UsageError(f"{low.name}: {name} is complex, which {low.kind} does not take")
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UsageError(
                f"{low.name}: {name}.weight has sparse gradients, which {low.kind} does not take; make the "
                "embedding with sparse=False, or leave it to SparseAdam in an optimizer of its own"
            )
    if optimizer.state and low.kind in ("lion8bit", "adafactor"):
        raise UsageError(
            f"{low.name}: {low.kind} cannot use the state of {type(optimizer).__name__}; apply it before the "
            "first step"
        )


def _without_state(graph: StepGraph) -> Iterator[Storage]:
    return (s for s in graph.storages if s.category != "optimizer_state")


def _gain(
    low: LowMemoryOptimizer, graph: StepGraph, model: nn.Module, saved: int, before: int, after: int
) -> str:
    """What the saving is worth, in words."""
    from memfit.techniques.low_memory_optimizers_bytes import LEAST_QUANTIZED

    share = saved / graph.peak_bytes if graph.peak_bytes else 0.0
    text = f"state {format_bytes(before)} → {format_bytes(after)}, {share:.1%} of the peak"
    if share >= NO_GAIN:
        return text
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    small = sum(numel < LEAST_QUANTIZED for numel in trained)
    most = next(iter(graph.by_category()), "other")
    return (
        f"{text}: {low.kind} does not help here. {small} of {len(trained)} tensors have fewer than "
        f"{LEAST_QUANTIZED} elements, and the most at the peak is {most} "
        f"({format_bytes(graph.by_category().get(most, 0))})"
    )
