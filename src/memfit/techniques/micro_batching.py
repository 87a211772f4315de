"""Micro-batching: one optimizer step over several smaller forward and backward passes, with the gradient of
the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, applied_techniques, refuse_second, whole_number

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class MicroBatching(Technique):
    """Cuts each batch into micro-batches whose gradients add up to those of the whole batch.

    The model does not change; ``apply`` notes the number for it (``micro_batches_of``). The training loop
    runs the pieces:

        for piece, weight in MicroBatching(micro_batches=4).split(batch):
            (weight * loss(model, piece)).backward()
        optimizer.step()

    Args:
        micro_batches: into how many pieces a batch is cut.
    """

    name: ClassVar[str] = "micro_batching"

    micro_batches: int = 2

    def __post_init__(self) -> None:
        whole_number(self.micro_batches, key="micro_batches", technique=self.name)

    def exactness(self, model: nn.Module) -> Exactness:
        """``reordered``; ``approximate`` for a model whose batch norms see smaller batches."""
        if self.micro_batches == 1:
            return "exact"
        return "reordered" if why_approximate(model) is None else "approximate"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        from memfit.techniques.saving import cut_into, saving_of

        return saving_of(graph, cut_into(graph, self.micro_batches))

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination

        refuse_second(model, MicroBatching)
        refuse_combination(model, self)
        return lambda: None

    def split(
        self, batch: Any, loss_weight: Callable[[Any], float] | None = None
    ) -> Iterator[tuple[Any, float]]:
        """Pieces of ``batch`` with the weight of each one's loss; the weights add up to 1.

        Args:
            batch: any nesting of dicts, lists and tuples; dimension 0 of every tensor is the sample
                dimension. What is no tensor goes into every piece as it is. A batch of fewer samples than
                pieces gives one a sample.
            loss_weight: over how many samples or tokens the loss of a piece takes its mean. Needed where
                that differs between pieces of one size (padding): without it, long and short texts count
                alike. ``None``: samples. Pieces of weight 0 are left out (see `weighted`).

        Raises:
            UsageError: tensors of different sizes in dimension 0, or none at all.
        """
        samples = _sample_count(batch)
        count = min(self.micro_batches, samples)
        bounds = [samples * number // count for number in range(count + 1)]
        pieces = [_cut(batch, start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
        yield from weighted(pieces, loss_weight)


def weighted(
    pieces: Sequence[Any], loss_weight: Callable[[Any], float] | None = None
) -> Iterator[tuple[Any, float]]:
    """Each of the batches that make up one step with the weight of its loss; the weights add up to 1.

    For batches that a loader gives one by one, and which need not be of one size. A piece of weight 0 (every
    token of it is ignored) is left out: its mean loss is a division by zero, which no weight makes good. If
    all are, all are given, with equal weights: so the plain step's result is got, not a number.

    Args:
        loss_weight: see `MicroBatching.split`.

    Raises:
        UsageError: a weight that is negative or not finite.

    Examples:
        >>> import torch
        >>> batches = [torch.ones(3), torch.ones(1)]
        >>> [weight for _, weight in weighted(batches)]
        [0.75, 0.25]
    """
    weights = [float((loss_weight or _sample_count)(piece)) for piece in pieces]
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"micro_batching: loss_weight gave {weight!r}; it counts samples or tokens")
    total = sum(weights)
    for piece, weight in zip(pieces, weights, strict=True):
        if weight or not total:
            yield piece, weight / total if total else 1.0 / len(pieces)


def micro_batches_of(model: nn.Module) -> int:
    """Into how many micro-batches the techniques applied to ``model`` cut a batch; 1 where none does."""
    counts = [t.micro_batches for t in applied_techniques(model) if isinstance(t, MicroBatching)]
    return counts[-1] if counts else 1


def why_approximate(model: nn.Module) -> str | None:
    """Why smaller batches change what ``model`` computes, or ``None`` where they do not."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            place = name or type(module).__name__
            return f"{place} is a batch norm in training mode: it normalizes over each micro-batch"
    return None


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors of a batch that have a sample dimension."""
    if hasattr(value, "narrow") and hasattr(value, "dim"):
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _sample_count(batch: Any) -> int:
    sizes = sorted({int(tensor.shape[0]) for tensor in _tensors(batch)})
    if len(sizes) != 1 or sizes[0] == 0:
        raise UsageError(
            "micro_batching: dimension 0 must be the samples in every tensor of a batch; here its sizes are "
            f"{sizes or 'missing'}"
        )
    return sizes[0]


def _cut(value: Any, start: int, end: int) -> Any:
    if hasattr(value, "narrow") and hasattr(value, "dim"):
        return value.narrow(0, start, end - start) if value.dim() > 0 else value
    if isinstance(value, Mapping):
        cut = {key: _cut(inner, start, end) for key, inner in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(inner, start, end) for inner in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(inner, start, end) for inner in value)
    return value
