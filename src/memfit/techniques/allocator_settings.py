"""Settings of PyTorch's CUDA allocator, changed while the process runs.

With ``expandable_segments`` the allocator grows its segments page by page (CUDA's virtual memory management),
so blocks of unlike sizes leave few holes: what is reserved stays near what is allocated. No value that is
computed changes.

Source: ``c10/cuda/CUDACachingAllocator.cpp``, and "Optimizing memory usage with PYTORCH_ALLOC_CONF" in
PyTorch's notes on CUDA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings(Technique):
    """Changes how PyTorch's CUDA allocator makes segments, for the whole process and from now on.

    Segments that are there already stay as they are: apply it before the first step. In a process that uses
    no CUDA it changes nothing. The same from the start of a process, parameters included, is
    ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    Args:
        expandable_segments: whether new segments can grow. Linux only; tensors in them cannot be shared with
            other processes by CUDA IPC on every system.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 4)
        >>> model = AllocatorSettings(expandable_segments=True).apply(model)
    """

    name: ClassVar[str] = "allocator_settings"

    expandable_segments: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise UsageError(
                f"{self.name}: expandable_segments is true or false, not {self.expandable_segments!r}"
            )

    def exactness(self, model: nn.Module) -> Exactness:
        return "exact"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Nothing of what the step requests: the reserved bytes fall, towards the allocated ones."""
        from memfit.techniques.saving import Saving

        return Saving(
            peak_bytes=0,
            note="lowers what is reserved, not what is requested: only a dry run or replay tells",
        )

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        refuse_second(model, AllocatorSettings)
        import torch

        if not torch.cuda.is_available():
            return lambda: None
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UsageError(f"{self.name}: they are the native allocator's; this process uses {backend}")
        before: str = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(_with(before, self.expandable_segments))
        # Named in any case: this one setting stays as it is when the text leaves it out.
        back = _with(before, _EXPANDABLE.search(before) is not None)
        return lambda: torch._C._accelerator_setAllocatorSettings(back)


def _with(settings: str, expandable_segments: bool) -> str:
    """The text with this setting changed: PyTorch forgets the other settings that a text does not name.

    Values may be lists in brackets, so the text is cut at commas outside of them.
    """
    kept = [part for part in re.split(r",(?![^\[]*\])", settings) if part.strip()]
    kept = [part for part in kept if part.partition(":")[0].strip() != "expandable_segments"]
    return ",".join([*kept, f"expandable_segments:{expandable_segments}"])
