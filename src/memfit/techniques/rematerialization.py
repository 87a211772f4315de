"""Rematerialization: chosen results are dropped after the forward pass, and computed again one by one when
the backward pass asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

KEPT = ("linear", "attention", "convolution")
"""What blocks keep unless told otherwise: what costs most to compute again."""


@dataclass(frozen=True, kw_only=True)
class Rematerialization(Technique):
    """Drops what blocks save for the backward pass, but for chosen results, and computes it again when asked
    for.

    Unlike `GradientCheckpointing` it works operator by operator and across blocks: what is not needed is not
    run again, what a block gets from the one before it need not be kept either, and the model's Python code
    runs once (branches that depend on data, caches, hooks and statistics are safe). Gradients, buffers and
    random state are bitwise those of the plain step. Under ``torch.compile`` it does nothing: the compiler
    chooses by itself.

    Args:
        blocks: block name → names of the operators whose results it keeps (see
            `memfit.techniques.operation_names`); ``""`` is the model outside of all named blocks, which keeps
            everything where it is not named. None: all repeated blocks, keeping linear layers, attention and
            convolutions.

    Examples:
        >>> import torch
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(16, 2)
        >>> model = torch.nn.Sequential(layer(), layer())
        >>> model = Rematerialization(blocks={"0": ["addmm:0"], "1": []}).apply(model)
        >>> sorted(name for name, module in model.named_modules() if "forward" in vars(module))
        ['', '0', '1']
    """

    name: ClassVar[str] = "rematerialization"

    blocks: Mapping[str, Sequence[str]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _checked(self.blocks))

    def exactness(self, model: nn.Module) -> Exactness:
        return "exact"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Needs the model unless ``blocks`` are named."""
        from memfit.techniques.recomputed_steps import RecomputedStep
        from memfit.techniques.saving import Saving

        if self.blocks is None and model is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its blocks")
        blocks = self.blocks_of(model) if model is not None else dict(self.blocks or {})
        step = RecomputedStep(graph, tuple(blocks))
        played = step.play(step.kept_by(blocks))
        return Saving(
            peak_bytes=graph.peak_bytes - played.peak_bytes,
            extra_flops=sum(graph.ops[op].flops for op in played.run_again),
        )

    def blocks_of(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Which blocks of ``model`` drop what they save, and what each keeps.

        Raises:
            UsageError: the model has no repeated blocks and none are named.
        """
        from memfit.techniques.blocks import block_names

        if self.blocks is not None:
            return {name: tuple(keeps) for name, keeps in self.blocks.items()}
        names = block_names(bare_model(model))
        if not names:
            raise UsageError(
                f"no repeated blocks found in this {type(model).__name__}; name the modules: "
                "Rematerialization(blocks={'encoder': ['linear']})"
            )
        return dict.fromkeys(names, KEPT)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.recomputable_region import RecomputableForward
        from memfit.techniques.replaced_forward import set_forwards

        refuse_second(model, Rematerialization)
        _refuse_sharded(model)
        forwards = [
            (module, RecomputableForward(module, name, keeps, vars(module).get("forward")))
            for name, module, keeps in self._chosen(bare_model(model))
        ]
        return set_forwards(forwards, self.name)

    def _chosen(self, model: nn.Module) -> list[tuple[str, nn.Module, tuple[str, ...] | None]]:
        """The whole model first, then its blocks: name, module, what it keeps (None: everything)."""
        from memfit.techniques.blocks import get_block

        blocks = self.blocks_of(model)
        chosen: dict[int, tuple[str, nn.Module, tuple[str, ...] | None]] = {}
        if "" in blocks or _is_called(model):  # else each block is recorded by itself
            chosen[id(model)] = ("", model, blocks.get(""))
        for name, keeps in blocks.items():
            block = get_block(model, name) if name else model
            _refuse_unfit(block, name)
            chosen.setdefault(id(block), (name, block, keeps))
        return list(chosen.values())


def _checked(blocks: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    if not isinstance(blocks, Mapping) or not blocks:
        raise UsageError(
            f"rematerialization: blocks must map block names to lists of what they keep, not {blocks!r}"
        )
    for name, keeps in blocks.items():
        if isinstance(keeps, str) or not isinstance(keeps, Sequence) or not all(map(_is_name, keeps)):
            raise UsageError(
                f"rematerialization: block {name!r} must have a list of names like 'linear:0', not {keeps!r}"
            )
    return {str(name): tuple(keeps) for name, keeps in blocks.items()}


def _is_name(value: object) -> bool:
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    return kind.isidentifier() and (number.isdigit() if colon else True)


def _refuse_unfit(block: nn.Module, name: str) -> None:
    import torch

    if isinstance(block, torch.jit.ScriptModule):
        raise UsageError(f"block {name!r} is a TorchScript module, whose forward cannot be replaced")
    if not _is_called(block):
        raise UsageError(
            f"{name!r} is a {type(block).__name__}, which is never called itself; name its members"
        )


def _is_called(module: nn.Module) -> bool:
    import torch

    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _refuse_sharded(model: nn.Module) -> None:
    """What FSDP gathers for a block's forward is gone when another block's backward computes from it."""
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "FlatParameter"):
            raise UsageError(
                f"rematerialization: parameter {name!r} is sharded ({type(parameter).__name__}), and is not "
                "there when other blocks' backward needs it; use gradient_checkpointing"
            )
