"""What a run met that the made-up GPU does not have, counted and put in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from memfit.core.units import format_bytes
from memfit.dryrun.devices import estimates, unknown_calls
from memfit.dryrun.shadow import device_tensors

aten = torch.ops.aten

_CUDNN = {
    aten.convolution.default: "convolutions",
    aten.cudnn_convolution.default: "convolutions",
    aten._cudnn_rnn.default: "recurrent layers",
    aten._scaled_dot_product_cudnn_attention.default: "attention by cuDNN",
}


class Unmodelled:
    """The account of one process. Tell it of every operation (`see`)."""

    def __init__(self) -> None:
        self._noted: Counter[str] = Counter()
        self._cudnn: Counter[str] = Counter()

    def note(self, text: str) -> None:
        """The run met what ``text`` says."""
        self._noted[text] += 1

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operation ran; those that cuDNN carries out are counted."""
        if func in _CUDNN and torch.backends.cudnn.enabled and device_tensors(args):
            self._cudnn[_CUDNN[func]] += 1

    def notes(self) -> Iterator[str]:
        """All of it in words; cuDNN's workspaces by what they are for."""
        yield from self._noted
        workspace = estimates().get("cuDNN workspace", 0)
        counted = f"counted as {format_bytes(workspace)}" if workspace else "not in the peaks"
        for name, count in self._cudnn.items():
            calls = f"{name}, {count} call{'' if count == 1 else 's'}"
            yield f"cuDNN's workspaces ({calls}): {counted}, which may be higher (see the device's memory)"

    def refused(self) -> Iterator[str]:
        """The calls to the GPU's libraries that did nothing, in a line."""
        calls = unknown_calls()
        if calls:
            yield f"CUDA library calls that did nothing: {', '.join(calls)}"
