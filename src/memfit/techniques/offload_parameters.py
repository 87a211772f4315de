"""Parameters of blocks in host memory or on disk, on the device only while their block runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.techniques.base import Technique, Undo, applied_techniques, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.offload import Where
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class ParameterOffload(Technique):
    """Keeps the parameters of blocks in host memory or on disk; on the device they are while a block runs.

    A block's parameters are copied to the device before its forward and again in its backward pass, while the
    block before them computes. Gradients go to the host, where the optimizer then steps; its state is there
    too. Apply it before techniques that change the same blocks, and before the optimizer's first step.

    On the CPU, ``to="disk"`` puts the parameters into a memory-mapped file, of which the system keeps in
    memory what it has room for.

    Args:
        to: ``"host"`` (pinned memory) or ``"disk"`` (a memory-mapped file in safetensors form,
            without a name).
        folder: of that file; the system's folder for temporary files by default.
        blocks: the modules whose parameters move; by default the repeated blocks of the model.
        device: where they compute; by default where they are now. With ``"cuda"`` a model that is too large
            for the device stays on the host and is never there as a whole.

    Examples:
        >>> import torch
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(64, 2)
        >>> model = torch.nn.Sequential(layer(), layer(), layer())
        >>> model = ParameterOffload(to="disk").apply(model)
        >>> model(torch.ones(16, 8, 64)).mean().backward()
    """

    name: ClassVar[str] = "parameter_offload"

    to: Where = "host"
    folder: str | None = None
    blocks: Sequence[str] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        from memfit.techniques.offload import check_where
        from memfit.techniques.saved_tensors_blocks import checked_block_names

        check_where(self.to, self.folder, technique=self.name)
        if self.device is not None and str(self.device).split(":", maxsplit=1)[0] not in ("cpu", "cuda"):
            raise UsageError(f"{self.name}: device is cpu or cuda, not {self.device!r}")
        object.__setattr__(self, "blocks", checked_block_names(self.blocks, technique=self.name))

    def exactness(self, model: nn.Module) -> Exactness:
        """``exact`` on the CPU; elsewhere the host's optimizer may round otherwise than the device's."""
        on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
        return "exact" if on_host and self.device in (None, "cpu") else "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Two blocks are on the device at once. Without the model, all parameters count as the blocks'."""
        from memfit.techniques.saved_tensors_blocks import chosen_blocks
        from memfit.techniques.saving import saving_of

        blocks = chosen_blocks(model, self.blocks) if model is not None else []
        sizes = sorted((sum(p.nbytes for p in b.parameters()) for _, b in blocks), reverse=True)
        prefixes = tuple(f"{name}." if name else "" for name, _ in blocks) or ("",)
        moved = {"parameter", "gradient", "optimizer_state"}
        kept, gone = [], 0
        for storage in graph.storages:
            if storage.category in moved and storage.name.startswith(prefixes):
                gone += storage.size_bytes if storage.category == "parameter" else 0
            else:
                kept.append(storage)
        note = f"each step moves {format_bytes(3 * gone)} over the bus; the optimizer steps on the host"
        return saving_of(graph, kept, extra_resting_bytes=sum(sizes[:2]), note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.offload_parameters_run import offload
        from memfit.techniques.saved_tensors_blocks import chosen_blocks

        refuse_second(model, ParameterOffload)
        refuse_combination(model, self)
        if any(technique.name == "optimizer_in_backward" for technique in applied_techniques(model)):
            raise UsageError(
                f"{self.name}: optimizer_in_backward would step before the gradients go to the host; apply "
                f"{self.name} first"
            )
        blocks = chosen_blocks(model, self.blocks)
        for name, block in blocks:
            if "forward" in vars(block):
                raise UsageError(
                    f"{self.name}: the forward of {name!r} was replaced by a technique; apply "
                    "parameter_offload first, then the others"
                )
        if optimizer is not None and optimizer.state:
            raise UsageError(
                f"{self.name}: apply it before the first step, as the optimizer's state moves too"
            )
        return offload(self, model, blocks)


def check_device(technique: ParameterOffload, found: Any) -> Any:
    """The device to compute on. UsageError where PyTorch has it not."""
    import torch

    device = torch.device(technique.device) if technique.device is not None else found
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"{technique.name}: device {technique.device!r} is not there; leave it out for the CPU"
        )
    return device
