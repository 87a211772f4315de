"""Pruning by magnitude: the smallest weights become zero and stay zero while training goes on.

    Pruning              zeros in place, undone to the bit; what to fine-tune with
    prune_structured     whole channels leave, so that modules, gradients and states are physically smaller
    to_sparse            after training, weights in a sparse layout where that is smaller

(the latter two in `memfit.techniques.pruning_structured` and `memfit.techniques.pruning_sparse`). Zeros take
as much memory as other numbers: only the latter two save any. Sources: Han et al., "Learning both Weights and
Connections" (2015); Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021) for 2:4.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Pattern = Literal["unstructured", "2:4"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


@dataclass(frozen=True, kw_only=True)
class Pruning(Technique):
    """Sets the weights of smallest magnitude to zero and keeps them there.

    Args:
        share: of each layer's weights that become zero; 2:4 is always half of them.
        pattern: ``"unstructured"``, or ``"2:4"``: two of each four along a row, which sparse tensor cores
            (Ampere and later) multiply at up to twice the speed.
        layers: patterns over the names of linear and convolution layers; none: all but the output layer.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> model = Pruning(share=0.75).apply(model)
        >>> int((model[0].weight == 0).sum())
        48
    """

    name: ClassVar[str] = "pruning"

    share: float = 0.5
    pattern: Pattern = "unstructured"
    layers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not 0 < self.share < 1:
            raise UsageError(f"{self.name}: share must be between 0 and 1, not {self.share!r}")
        if self.pattern not in PATTERNS:
            raise UsageError(
                f"{self.name}: pattern must be one of {', '.join(PATTERNS)}, not {self.pattern!r}"
            )
        if isinstance(self.layers, str) or not all(isinstance(name, str) for name in self.layers):
            raise UsageError(f"{self.name}: layers must be a list of names, not {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))

    @staticmethod
    def candidates() -> Iterator[Mapping[str, Any]]:
        """Settings worth trying."""
        yield from ({"share": 0.5}, {"pattern": "2:4"})

    def exactness(self, model: nn.Module) -> Exactness:
        return "changes training"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Nothing while it trains: zeros are stored like other numbers."""
        from memfit.techniques.saving import Saving

        return Saving(
            peak_bytes=0,
            note="zeros take as much memory as other numbers; prune_structured makes modules smaller, "
            "to_sparse stores what is left",
        )

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.pruning_masks import hold_zeros

        refuse_second(model, Pruning)
        layers = target_layers(self, bare_model(model))
        if any("bitsandbytes" in type(layer.weight).__module__ for layer in layers.values()):
            raise UsageError(f"{self.name}: weights that are quantized cannot be pruned; prune them first")
        return hold_zeros([layer.weight for layer in layers.values()], self.mask_of, optimizer)

    def mask_of(self, weight: Tensor) -> Tensor:
        """True where a weight stays, for a weight of any shape."""
        import torch

        size = weight.detach().abs()
        if self.pattern == "2:4":
            groups = size.reshape(-1, 4)
            mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(2, dim=1).indices, True)
            return mask.view(weight.shape)
        count = round(self.share * size.numel())
        if weight.device.type == "meta" or count == 0:
            return torch.ones_like(size, dtype=torch.bool)
        mask = torch.ones(size.numel(), dtype=torch.bool, device=size.device)
        mask[size.flatten().argsort(stable=True)[:count]] = False
        return mask.view(weight.shape)


def target_layers(pruning: Pruning, root: nn.Module) -> dict[str, Any]:
    """The layers that are pruned, by name; a weight that two layers share only once.

    Raises:
        UsageError: no layer fits, a pattern fits none, or a weight has no rows of a multiple of four.
    """
    from torch import nn

    from memfit.techniques.chunked_cross_entropy import find_output_layer

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = {name: module for name, module in root.named_modules() if isinstance(module, kinds)}
    for pattern in pruning.layers:
        if not any(fnmatch.fnmatch(name, pattern) for name in found):
            raise UsageError(
                f"{pruning.name}: {pattern!r} fits no layer; there are {', '.join(found) or 'none'}"
            )
    output = find_output_layer(root)
    last = output[0] if output is not None else next(reversed(found), None)
    chosen = {
        name: module
        for name, module in found.items()
        if (any(fnmatch.fnmatch(name, p) for p in pruning.layers) if pruning.layers else name != last)
    }
    once = {id(module.weight): (name, module) for name, module in reversed(chosen.items())}
    kept = dict(reversed(once.values()))
    if pruning.pattern == "2:4" and not pruning.layers:
        kept = {name: m for name, m in kept.items() if m.weight.shape[-1] % 4 == 0}
    uneven = [name for name, m in kept.items() if pruning.pattern == "2:4" and m.weight.shape[-1] % 4]
    if uneven:
        raise UsageError(f"{pruning.name}: rows of {uneven[0]}.weight are no multiple of 4, which 2:4 needs")
    if not kept:
        raise UsageError(f"{pruning.name}: this {type(root).__name__} has no layer to prune")
    return kept
