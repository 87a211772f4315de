"""Saved activations in host memory or on disk between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.techniques.base import Technique, Undo, refuse_second, whole_number

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saved_tensors import Keeper
    from memfit.techniques.saving import Saving

Where = Literal["host", "disk"]


def check_where(to: str, folder: str | None, *, technique: str) -> None:
    """UsageError for a place that there is not, or a folder without a disk."""
    if to not in ("host", "disk"):
        raise UsageError(f"{technique}: to is host or disk, not {to!r}")
    if folder is not None and to != "disk":
        raise UsageError(f"{technique}: folder is for to='disk'")


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(Technique):
    """Moves what blocks save for the backward pass off the device, and back before it is used.

    The last block's stays: the backward pass begins with it. On CUDA the copies run on streams of their own,
    from and to pinned memory that is used again in every step. A model on the CPU is offloaded to disk only.

    Args:
        to: ``"host"`` (pinned memory) or ``"disk"`` (a file in safetensors form, without a name:
            gone with the process).
        folder: of that file; the system's folder for temporary files by default.
        blocks: modules whose saved activations move; by default the repeated blocks but the last.
        prefetch: how many storages are fetched ahead of their use in the backward pass.
        min_elements: smaller saved tensors stay.
        compression_algorithm: a codec (see `memfit.MemoryCompression`) that makes smaller what is moved.

    Examples:
        >>> import torch
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(64, 2)
        >>> model = torch.nn.Sequential(layer(), layer(), layer())
        >>> model = ActivationOffload(to="disk").apply(model)
        >>> model(torch.ones(16, 8, 64)).mean().backward()
    """

    name: ClassVar[str] = "activation_offload"

    to: Where = "host"
    folder: str | None = None
    blocks: Sequence[str] | None = None
    prefetch: int = 2
    min_elements: int = 4096
    compression_algorithm: str = "none"

    def __post_init__(self) -> None:
        from memfit.techniques.compression import check_algorithm
        from memfit.techniques.saved_tensors_blocks import checked_block_names

        check_where(self.to, self.folder, technique=self.name)
        whole_number(self.prefetch, key="prefetch", technique=self.name, least=0)
        whole_number(self.min_elements, key="min_elements", technique=self.name)
        check_algorithm(self.compression_algorithm, technique=self.name, others=("none",))
        object.__setattr__(self, "blocks", checked_block_names(self.blocks, technique=self.name))

    def exactness(self, model: nn.Module) -> Exactness:
        """``exact``, but for a lossy ``compression_algorithm``."""
        from memfit.techniques.codecs import CODECS

        lossless = self.compression_algorithm == "none" or CODECS[self.compression_algorithm].lossless
        return "exact" if lossless else "approximate"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Without the model and ``blocks``, for all that the step saves; without what is on its way."""
        from memfit.techniques.saved_tensors_blocks import kept_otherwise
        from memfit.techniques.saving import saving_of

        names = self.blocks if model is None else [name for name, _ in self._blocks_of(model)]
        after = list(kept_otherwise(graph, names, self.min_elements, lambda dtype: 0.0))
        moved = sum(storage.size_bytes for storage in after) - sum(s.size_bytes for s in graph.storages)
        note = f"each step moves {format_bytes(moved)} to the {self.to} and back"
        return saving_of(graph, after, note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.saved_tensors import keep_in_blocks

        refuse_second(model, ActivationOffload)
        refuse_combination(model, self)
        return keep_in_blocks(self._blocks_of(model), self.keeper(), self.name)

    def keeper(self) -> Keeper:
        """What keeps the contents: a new one, with a pool or file of its own."""
        from memfit.techniques.offload_compressed import CompressedFirst
        from memfit.techniques.offload_disk import ToDisk
        from memfit.techniques.offload_transfer import ToHost

        keeper: Keeper
        if self.to == "host":
            keeper = ToHost(self.min_elements, self.prefetch)
        else:
            keeper = ToDisk(self.min_elements, self.prefetch, self.folder)
        if self.compression_algorithm == "none":
            return keeper
        return CompressedFirst(keeper, self.compression_algorithm)

    def _blocks_of(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        from memfit.techniques.saved_tensors_blocks import chosen_blocks

        chosen = chosen_blocks(model, self.blocks)
        return chosen[:-1] if self.blocks is None and len(chosen) > 1 else chosen
