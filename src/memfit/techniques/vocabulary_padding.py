"""A vocabulary padded to a friendly multiple: larger matrices that run faster, with the loss unchanged.

Matrix products on tensor cores want sizes that are multiples of 8 (64 and more are better still); GPT-2's
50257 is none. The output layer, and the embedding that shares its weight, get rows of zeros; the logits of
those rows are cut off before anybody sees them, so loss and gradients are those of the true vocabulary, the
padded rows get a gradient of zero and stay zero. ``state_dict`` keeps the true shape.
Source: Karpathy, nanoGPT (2023): 50257 → 50304 gave about 25 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second, whole_number

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class VocabularyPadding(Technique):
    """Pads the output layer, and an embedding that shares its weight, to a multiple of rows.

    Args:
        multiple: of how many rows the weight becomes.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))
        >>> model = VocabularyPadding(multiple=64).apply(model)
        >>> model[1].weight.shape, model(torch.zeros(1, dtype=torch.long)).shape
        (torch.Size([128, 8]), torch.Size([1, 100]))
        >>> model.state_dict()["1.weight"].shape
        torch.Size([100, 8])
    """

    name: ClassVar[str] = "vocabulary_padding"

    multiple: int = 64

    def __post_init__(self) -> None:
        whole_number(self.multiple, key="multiple", technique=self.name, least=2)

    def exactness(self, model: nn.Module) -> Exactness:
        """``reordered``: the same sums, in kernels that cut larger matrices otherwise."""
        return "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """What the rows of zeros cost: weight, gradient and state. Needs the model to find the layer."""
        from memfit.techniques.saving import Saving

        if model is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its output layer")
        layer = self._layer(bare_model(model))
        missing = -int(layer.weight.shape[0]) % self.multiple
        states = sum(s.size_bytes for s in graph.storages if s.category == "optimizer_state" and s.born < 0)
        weights = sum(s.size_bytes for s in graph.storages if s.category == "parameter" and s.born < 0)
        row = int(layer.weight.shape[1]) * layer.weight.element_size()
        resting = int(missing * row * (1 + states / max(weights, 1)))
        return Saving(peak_bytes=-resting - missing * row, resting_bytes=-resting, note="for speed")

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from torch.nn.parallel import DataParallel, DistributedDataParallel

        from memfit.techniques.vocabulary_rows import pad_rows

        refuse_second(model, VocabularyPadding)
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise UsageError(f"{self.name}: {type(model).__name__} knows the weight's shape; wrap it later")
        root = bare_model(model)
        layer = self._layer(root)
        if "forward" in vars(layer):
            raise UsageError(
                f"{self.name}: another technique has replaced the output layer's forward "
                "(chunked_cross_entropy reads its weight as it is); take that back first"
            )
        rows = int(layer.weight.shape[0])
        return pad_rows(root, layer, rows + -rows % self.multiple, optimizer)

    def _layer(self, root: nn.Module) -> Any:
        from memfit.techniques.chunked_cross_entropy import find_output_layer

        found = find_output_layer(root)
        if found is None:
            raise UsageError(
                f"{self.name}: no layer of this {type(root).__name__} looks like an output layer"
            )
        return found[1]
