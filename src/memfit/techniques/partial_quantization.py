"""Quantizes only the layers that can bear it: chosen by what each does to the loss on the user's own data.

Weights of linear layers become 8 bit (torchao) or 4 bit NF4 (bitsandbytes) and are frozen, so it is for
inference, or under adapters. ``choose`` measures: one layer at a time is rounded as it would be, the loss is
taken on the given batches, and layers are taken from the least sensitive on, as long as the loss with all
of them together stays within the tolerance. Sources: Dettmers et al., "QLoRA" (2023) for NF4; Dong et al.,
"HAWQ" (2019) for choosing by sensitivity.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, applied_techniques, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.partial_quantization_choice import Sensitivity
    from memfit.techniques.saving import Saving

Kind = Literal["int8", "nf4"]
Backend = Literal["auto", "memfit", "torchao", "bitsandbytes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BACKENDS: Mapping[Kind, tuple[Backend, ...]] = {"int8": ("memfit", "torchao"), "nf4": ("bitsandbytes",)}
"""What makes each kind; the first is what ``"auto"`` takes."""


@dataclass(frozen=True, kw_only=True)
class PartialQuantization(Technique):
    """Quantizes and freezes the weights of linear layers.

    Args:
        kind: ``"int8"`` (a byte, and a scale for each row) or ``"nf4"`` (about 0.52 bytes).
        backend: ``"memfit"`` (int8, trains what is around the layers too), ``"torchao"`` (int8) or
            ``"bitsandbytes"`` (nf4); the latter two by ``pip install 'memfit[quant]'``.
        layers: patterns over the names of linear layers; none: all but the output layer and those that share
            their weight. `choose` names the safe ones.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        >>> data = [(torch.randn(8, 64), torch.arange(8) % 4)]
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> chosen, rows = PartialQuantization(kind="nf4").choose(model, data, loss, tolerance=0.05)
        >>> [row.layer for row in rows]
        ['0']
    """

    name: ClassVar[str] = "partial_quantization"

    kind: Kind = "int8"
    layers: Sequence[str] = ()
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"{self.name}: kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if isinstance(self.layers, str) or not all(isinstance(name, str) for name in self.layers):
            raise UsageError(f"{self.name}: layers must be a list of names, not {self.layers!r}")
        if self.backend not in ("auto", *BACKENDS[self.kind]):
            makers = " or ".join(BACKENDS[self.kind])
            raise UsageError(f"{self.name}: {self.kind} comes from {makers}, not {self.backend!r}")
        object.__setattr__(self, "layers", tuple(self.layers))

    def exactness(self, model: nn.Module) -> Exactness:
        """The layers are frozen, so something else is trained; inference is approximate."""
        return "changes training"

    def target_layers(self, model: nn.Module) -> dict[str, Any]:
        """The layers that are quantized, by name.

        Raises:
            UsageError: no layer fits, or a pattern fits none.
        """
        from torch import nn

        from memfit.techniques.lora import _left_alone

        root = bare_model(model)
        linears = {name: module for name, module in root.named_modules() if type(module) is nn.Linear}
        if not self.layers:
            alone = _left_alone(root) or set(list(linears)[-1:])
            chosen = {name: layer for name, layer in linears.items() if name not in alone}
        else:
            chosen = {}
            for pattern in self.layers:
                found = {n: m for n, m in linears.items() if fnmatch.fnmatch(n, pattern)}
                if not found:
                    there = ", ".join(linears) or "none"
                    raise UsageError(f"{self.name}: {pattern!r} fits no linear layer; there are {there}")
                chosen |= found
        if not chosen:
            raise UsageError(f"{self.name}: this {type(root).__name__} has no linear layer to quantize")
        return chosen

    def choose(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        tolerance: float = 0.01,
    ) -> tuple[Self, tuple[Sensitivity, ...]]:
        """The same settings with the safe layers only, and how sensitive each layer is, least first.

        Args:
            batches: data that is like what the model will see.
            loss: ``(model, batch) -> scalar tensor``.
            tolerance: by how much of itself the loss may rise with all chosen layers together.

        Raises:
            UsageError: no batch, or no layer is safe within the tolerance.
        """
        from memfit.techniques.partial_quantization_choice import choose

        names, rows = choose(
            self.kind, bare_model(model), self.target_layers(model), batches, loss, tolerance
        )
        return replace(self, layers=names), rows

    def weight_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantized weight."""
        from memfit.techniques.lora import nf4_bytes

        return nf4_bytes(rows * columns) if self.kind == "nf4" else rows * columns + 4 * rows

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Weights by their new size; gradients and states of frozen weights are gone. Needs the model."""
        from memfit.techniques.saving import saving_of

        if model is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its layers")
        sizes = {
            f"{name}.weight": self.weight_bytes(*layer.weight.shape)
            for name, layer in self.target_layers(model).items()
        }
        return saving_of(graph, _after(graph, sizes), note="quantized layers do not train")

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from torch.nn.parallel import DataParallel, DistributedDataParallel

        from memfit.techniques.partial_quantization_layers import quantize_layers

        refuse_second(model, PartialQuantization)
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise UsageError(
                f"{self.name}: {type(model).__name__} knows the plain weights; wrap the model later"
            )
        for technique in applied_techniques(model):
            raise UsageError(
                f"{self.name} puts other layers in; {technique.name} has looked at those of now: apply "
                f"{self.name} first"
            )
        layers = self.target_layers(model)
        backend = BACKENDS[self.kind][0] if self.backend == "auto" else self.backend
        if importlib.util.find_spec(backend) is None:
            raise CannotRunHere(
                f"{self.name}: {self.kind} needs {backend}, which is not installed: "
                "pip install 'memfit[quant]'"
            )
        return quantize_layers(bare_model(model), layers, backend, optimizer)


def _after(graph: StepGraph, sizes: Mapping[str, int]) -> Iterator[Any]:
    for storage in graph.storages:
        if storage.name not in sizes:
            yield storage
        elif storage.category == "parameter":
            yield replace(storage, size_bytes=sizes[storage.name])
