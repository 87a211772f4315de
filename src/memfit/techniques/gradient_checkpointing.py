"""Gradient checkpointing: chosen blocks keep their inputs (and chosen outputs) only and run again in the
backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, whole_number
from memfit.techniques.saved_operations import check_names

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.blocks import BlockChain
    from memfit.techniques.checkpointed_forward import CheckpointedForward
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class GradientCheckpointing(Technique):
    """Recomputes blocks in the backward pass instead of keeping what they computed.

    Gradients, buffers (running statistics too) and random state are bitwise those of the plain step. Blocks
    are found by themselves (``find_block_chains``) or named. With none of the first three settings, every
    block is recomputed.

    Args:
        checkpoint_frequency: every how many blocks of each chain one is recomputed (1: all of them).
        blocks: block name → the operations whose outputs this block keeps; an empty list recomputes all of
            it.
        memory_savings: instead of a frequency, the share (above 0, up to 1) of each chain's blocks to
            recompute, taken from its start: the last blocks are recomputed when the backward pass holds
            most, so they cost most to have. Blocks of a chain count alike. Each recomputed block still keeps
            its input.
        save: the operations that every recomputed block keeps (not together with ``blocks``): ``"linear"``,
            ``"linear:3"`` (the fourth product with a weight matrix), ``"attention"``, ``"convolution"``,
            ``"normalization"``, ``"pointwise"``, ``"random"``.

    Examples:
        >>> import torch
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(16, 2)
        >>> model = torch.nn.Sequential(layer(), layer(), layer(), layer())
        >>> model = GradientCheckpointing(checkpoint_frequency=2).apply(model)
        >>> [name for name, module in model.named_children() if "forward" in vars(module)]
        ['0', '2']
    """

    name: ClassVar[str] = "gradient_checkpointing"

    checkpoint_frequency: int | None = None
    blocks: Mapping[str, Sequence[str]] | None = field(default=None, hash=False)
    save: Sequence[str] = ()
    memory_savings: float | None = None

    def __post_init__(self) -> None:
        given = [
            key
            for key in ("checkpoint_frequency", "blocks", "memory_savings")
            if getattr(self, key) is not None
        ]
        given += ["save"] if self.save and self.blocks is not None else []
        if len(given) > 1:
            raise UsageError(f"{self.name}: give one of {' and '.join(given)}, not both")
        if self.checkpoint_frequency is not None:
            whole_number(self.checkpoint_frequency, key="checkpoint_frequency", technique=self.name)
        if self.memory_savings is not None and not _is_share(self.memory_savings):
            raise UsageError(
                f"{self.name}: memory_savings must be above 0 and at most 1, not {self.memory_savings!r}"
            )
        object.__setattr__(self, "save", check_names(self.save, place=f"{self.name}: save"))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _checked_blocks(self.blocks))

    def exactness(self, model: nn.Module) -> Exactness:
        return "exact"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Needs the model unless ``blocks`` are named. Kept outputs (``save``) are not counted."""
        from memfit.techniques.saving import recomputed, saving_of

        if model is None and self.blocks is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its blocks")
        blocks = list(self.blocks) if model is None and self.blocks else list(self.blocks_of(model))  # type: ignore[arg-type]
        flops = sum(op.flops for block in blocks for op in graph.under(block, ("forward",)))
        note = "outputs that blocks keep are not counted: the saving and the cost are upper bounds"
        keeps = bool(self.save) or any((self.blocks or {}).values())
        return saving_of(graph, recomputed(graph, blocks), extra_flops=flops, note=note if keeps else "")

    def blocks_of(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Which blocks of ``model`` are recomputed, and what each keeps.

        Raises:
            UsageError: the model has no repeated blocks and none are named.
        """
        from memfit.techniques.blocks import find_block_chains

        if self.blocks is not None:
            return {name: tuple(saves) for name, saves in self.blocks.items()}
        chains = find_block_chains(model)
        if not chains:
            raise UsageError(
                f"no repeated blocks found in this {type(model).__name__}; name the modules to recompute: "
                "GradientCheckpointing(blocks={'encoder': []})"
            )
        return {name: tuple(self.save) for chain in chains for name in self._chosen(chain)}

    def _chosen(self, chain: BlockChain) -> tuple[str, ...]:
        if self.memory_savings is not None:
            return chain.names[: math.ceil(self.memory_savings * len(chain.names) - 1e-9)]
        return chain.names[:: self.checkpoint_frequency or 1]

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.blocks import get_block
        from memfit.techniques.checkpointed_forward import CheckpointedForward
        from memfit.techniques.replaced_forward import set_forwards

        _refuse_own_checkpointing(model)
        chosen: dict[int, tuple[nn.Module, CheckpointedForward]] = {}
        for name, saves in self.blocks_of(model).items():
            block = get_block(model, name)
            _refuse_unfit(block, name)
            previous = vars(block).get("forward")
            chosen.setdefault(id(block), (block, CheckpointedForward(block, name, saves, previous)))
        _refuse_selective_nesting(chosen)
        return set_forwards(chosen.values(), "gradient checkpointing")


def _refuse_unfit(block: nn.Module, name: str) -> None:
    import torch

    from memfit.techniques.checkpointed_forward import CheckpointedForward

    if isinstance(vars(block).get("forward"), CheckpointedForward):
        raise UsageError(f"block {name!r} is recomputed already; memfit.undo(model) takes that back")
    if isinstance(block, torch.jit.ScriptModule):
        raise UsageError(f"block {name!r} is a TorchScript module, whose forward cannot be replaced")
    if type(block).forward is torch.nn.Module.forward and "forward" not in vars(block):
        raise UsageError(
            f"{name!r} is a {type(block).__name__}, which is never called itself; name its members"
        )


def _refuse_own_checkpointing(model: nn.Module) -> None:
    """transformers' own switch would recompute every block within its recompute."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"{name or type(module).__name__!r} does gradient checkpointing of its own; call "
                "model.gradient_checkpointing_disable() first"
            )


def _refuse_selective_nesting(chosen: Mapping[int, tuple[nn.Module, CheckpointedForward]]) -> None:
    for block, forward in chosen.values():
        inner = [
            chosen[id(module)][1]
            for module in block.modules()
            if module is not block and id(module) in chosen
        ]
        for other in inner:
            if forward.saves or other.saves:
                raise UsageError(
                    f"block {other.name!r} lies within block {forward.name!r}: blocks that keep outputs "
                    "cannot be nested"
                )


def _checked_blocks(blocks: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    if not isinstance(blocks, Mapping) or not blocks:
        raise UsageError(
            f"gradient_checkpointing: blocks must map block names to lists of what they keep, not {blocks!r}"
        )
    place = "gradient_checkpointing: block {!r}"
    return {str(name): check_names(saves, place=place.format(name)) for name, saves in blocks.items()}


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
