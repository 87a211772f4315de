"""Chunked output layer and cross entropy: the logits of a batch are the largest tensors of a language
model's step."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, applied_techniques, refuse_second, whole_number

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Backend = Literal["torch", "liger"]
_LEAST_CLASSES = 8192
"""A Linear with at least this many outputs counts as an output layer; below, it must be tied to an embedding
or be as wide as one, or be named by the user."""


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy(Technique):
    """Computes output layer, cross entropy and their gradients chunk by chunk over the tokens.

    The model and the loss stay as they are: the output layer gives logits that are not computed before
    something looks at them, and ``torch.nn.functional.cross_entropy`` (and what is built on it, as the
    losses in transformers) on them runs in chunks. Nothing is recomputed. Any other use of the logits
    computes them, as without the technique.

    Args:
        chunks: in how many pieces the tokens are cut; more pieces need less memory.
        layer: the output layer's name, where it is not found by itself.
        backend: ``"torch"`` runs everywhere; ``"liger"`` is Liger-Kernel's Triton kernel, for CUDA, which
            chooses the number of pieces itself. Losses with class weights run by ``"torch"`` all the same.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9000, 8), torch.nn.Linear(8, 9000))
        >>> ids = torch.arange(12)
        >>> logits = ChunkedCrossEntropy(chunks=4).apply(model)(ids)
        >>> torch.nn.functional.cross_entropy(logits, ids).backward()
    """

    name: ClassVar[str] = "chunked_cross_entropy"

    chunks: int = 8
    layer: str | None = None
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        whole_number(self.chunks, key="chunks", technique=self.name)
        if self.backend not in typing.get_args(Backend):
            raise UsageError(f"{self.name}: backend must be 'torch' or 'liger', not {self.backend!r}")

    @classmethod
    def candidates(cls) -> tuple[dict[str, Any], ...]:
        """Settings that are worth trying by themselves; the other backend runs on a real GPU only."""
        return ({}, {"chunks": 16}, {"chunks": 4})

    def exactness(self, model: nn.Module) -> Exactness:
        return "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """The logits and all that has their size hold a chunk of the tokens only. Needs the model unless
        ``layer`` is named."""
        from memfit.techniques.saving import MADE_BY_SAMPLES, saving_of

        if model is None and self.layer is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its output layer")
        name = self.layer if model is None else self._output_layer(model)[0]
        made = [s for s in graph.storages if s.born >= 0 and graph.ops[s.born].module == name]
        logits = max((s.size_bytes for s in made if graph.ops[s.born].phase == "forward"), default=0)
        sizes = {logits // 2, logits, 2 * logits} - {0}
        whole = [s for s in graph.storages if s.born >= 0 and s.category in MADE_BY_SAMPLES]
        cut = {s.id for s in whole if s.size_bytes in sizes}
        return saving_of(
            graph,
            (
                replace(s, size_bytes=s.size_bytes // self.chunks) if s.id in cut else s
                for s in graph.storages
            ),
        )

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.deferred_forward import DeferredForward
        from memfit.techniques.replaced_forward import set_forwards

        refuse_second(model, ChunkedCrossEntropy)
        _refuse_sharded(model)
        name, layer = self._output_layer(model)
        _refuse_changed(model, name, layer)
        if self.backend == "liger":
            from memfit.techniques.liger_cross_entropy import check_liger

            check_liger(name, layer)
        return set_forwards([(layer, DeferredForward(layer, self.chunks, self.backend))], self.name)

    def _output_layer(self, model: nn.Module) -> tuple[str, nn.Module]:
        from memfit.techniques.blocks import get_block

        if self.layer is not None:
            return self.layer, get_block(model, self.layer)
        found = find_output_layer(model)
        if found is None:
            raise UsageError(
                f"{self.name}: no output layer found in this {type(model).__name__} (a Linear as wide as a "
                "vocabulary); name it: ChunkedCrossEntropy(layer='head')"
            )
        return found


def find_output_layer(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The Linear that gives the logits, with its name; ``None`` where no layer looks like it.

    In this order: what transformers' ``get_output_embeddings`` says; a Linear that shares its weight with an
    embedding; the last Linear that is as wide as an embedding has rows and wider than its input, or is the
    model's last one; the last Linear with at least 8192 outputs.
    """
    linears = [(n, module) for n, module in model.named_modules() if _is_linear(module) and ".lora_" not in n]
    told = {id(layer) for layer in _told_by_model(model)}
    embeddings = [
        m for m in model.modules() if type(m).__name__.endswith("Embedding") and hasattr(m, "num_embeddings")
    ]
    tied = {id(embedding.weight) for embedding in embeddings}
    rows = {embedding.num_embeddings for embedding in embeddings}
    rules = (
        lambda layer: id(layer) in told,
        lambda layer: id(layer.weight) in tied,
        lambda layer: layer.out_features in rows and layer.out_features > layer.in_features,
        lambda layer: layer.out_features in rows and layer is linears[-1][1],
        lambda layer: layer.out_features >= _LEAST_CLASSES and layer.out_features > layer.in_features,
    )
    for rule in rules:
        fitting = [(name, layer) for name, layer in linears if rule(layer)]
        if fitting:
            return fitting[-1]
    return None


def _told_by_model(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        ask = getattr(type(module), "get_output_embeddings", None)
        layer = ask(module) if ask is not None else None
        if layer is not None and _is_linear(layer):
            yield layer


def _is_linear(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear)


def _is_plain_linear(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _refuse_changed(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Raises UsageError where the layer's logits are not its weight's alone, with what made it so."""
    wrapper, _, last = name.rpartition(".")
    adapted = model.get_submodule(wrapper) if last == "base_layer" else layer
    if hasattr(adapted, "lora_A"):
        name = name if adapted is layer else wrapper
        raise UsageError(
            f"chunked_cross_entropy: the output layer {name!r} has LoRA's adapters, whose share of the "
            "logits is not in its weight; leave it out of LoRA's targets"
        )
    if "forward" in vars(layer):
        names = [technique.name for technique in applied_techniques(model)]
        padded = [name for name in names if name == "vocabulary_padding"]
        others = ", ".join(padded or names) or "something else"
        raise UsageError(
            f"chunked_cross_entropy: the forward of the output layer {name!r} was replaced already by "
            f"{others}: it is computed in chunks by its weight alone, so take that back first"
        )
    if not _is_plain_linear(layer):
        raise UsageError(
            f"chunked_cross_entropy: the output layer {name!r} is a {type(layer).__name__} with a forward of "
            "its own; only a plain torch.nn.Linear can be computed in chunks"
        )


def _refuse_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__):
            raise UsageError(
                f"chunked_cross_entropy: {name or type(module).__name__!r} is sharded by FSDP, which takes "
                "the output layer's weight away before the loss is computed; apply it before the model is "
                "sharded, as memfit.distributed.wrap(model, plan=…, strategy='fsdp2') does"
            )
