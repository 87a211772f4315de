"""Which of PyTorch's attention kernels runs, and with which width of heads.

Scaled dot product attention has four implementations: ``flash``, ``efficient`` and ``cudnn`` never hold the
scores (tokens x tokens for each head), ``math`` does. Which one PyTorch takes depends on types, masks and
widths; here one is asked for first. Heads whose width does not suit a kernel can be padded with zeros:
``softmax(q k' / sqrt(d)) v`` stays what it is, since zeros add nothing to the products, the scale is that of
the true width, and the padded columns of the result are cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import (
    Technique,
    Undo,
    applied_techniques,
    bare_model,
    refuse_second,
    whole_number,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Backend = Literal["flash", "efficient", "cudnn", "math"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Technique):
    """Asks for one of PyTorch's attention kernels first, throughout a model.

    Args:
        backend: ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.
        fallback: whether ``math`` may run where the chosen one cannot (a mask, a type, a device); without it
            PyTorch raises there.
        pad_heads_to: a multiple to which the width of heads is padded with zeros, such as 8; none: as it is.

    Examples:
        >>> import torch
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> model = AttentionBackend(backend="math").apply(model)
        >>> model(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    name: ClassVar[str] = "attention_backend"

    backend: Backend = "flash"
    fallback: bool = True
    pad_heads_to: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(
                f"{self.name}: backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}"
            )
        if self.pad_heads_to is not None:
            whole_number(self.pad_heads_to, key="pad_heads_to", technique=self.name, least=2)

    @staticmethod
    def candidates() -> Iterator[Mapping[str, Any]]:
        """Settings worth trying: each kernel, and heads of a friendly width."""
        yield from ({"backend": backend} for backend in BACKENDS)
        yield {"backend": "flash", "pad_heads_to": 8}

    def exactness(self, model: nn.Module) -> Exactness:
        return "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """What a step that holds its scores would not hold with a fused kernel."""
        from memfit.techniques.saving import Saving, saving_of

        scores = _score_storages(graph)
        if self.backend == "math":
            note = "math holds the scores: it costs where a fused kernel ran" if not scores else ""
            return Saving(peak_bytes=0, note=note)
        if not scores:
            return Saving(peak_bytes=0, note="no operator of this step holds attention scores")
        return saving_of(graph, (s for s in graph.storages if s.id not in scores))

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.attention_forward import AttentionForward
        from memfit.techniques.replaced_forward import set_forwards

        refuse_second(model, AttentionBackend)
        for technique in applied_techniques(model):
            if technique.name == "gradient_checkpointing":
                raise UsageError(
                    f"{self.name}: blocks that are recomputed must choose the same kernel again; apply it "
                    "before gradient_checkpointing"
                )
        root = bare_model(model)
        owners = [root, *_blocks(root)]
        forwards = [
            (m, AttentionForward(m, vars(m).get("forward"), self.backend, self.fallback, self.pad_heads_to))
            for m in {id(m): m for m in owners}.values()
        ]
        return set_forwards(forwards, self.name)


def _blocks(root: nn.Module) -> list[nn.Module]:
    """Blocks that may be recomputed by themselves, outside of the model's forward."""
    from memfit.techniques.blocks import block_names, get_block

    return [get_block(root, name) for name in block_names(root)]


def _score_storages(graph: StepGraph) -> set[int]:
    """What softmax makes between two batched products of the forward pass, and saves."""
    found: set[int] = set()
    forward = [op for op in graph.ops if op.phase == "forward" and not op.is_view]
    for number, op in enumerate(forward):
        around = [other.name for other in forward[max(0, number - 4) : number + 4]]
        if "_softmax" in op.name and any("bmm" in name for name in around):
            found |= {s for s in op.outputs if graph.storages[s].saved}
    return found
