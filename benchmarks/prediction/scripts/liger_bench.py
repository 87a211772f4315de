"""What the operations of a Liger-Kernel row share: what a row says, and how its runs go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32, "torch.float16": torch.float16}


@dataclass(frozen=True)
class Row:
    """What a row says of its operation."""

    kernel: str
    mode: str
    x_name: str
    x: int
    config: Mapping[str, Any]
    timestamp: str

    def __getitem__(self, name: str) -> Any:
        """A size: the one that varies, or one of the configuration."""
        return self.x if name == self.x_name else self.config[name]

    @property
    def dtype(self) -> torch.dtype:
        """As the configuration has it; single precision where it says nothing."""
        return _DTYPES[self.config.get("dtype", "torch.float32")]


Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Bench:
    """An operation on its tensors.

    Args:
        forward: the operation.
        inputs: for `torch.autograd.grad`; empty: gradients are left in the leaves.
        gradients: of the outputs; ``"random"``, ``"ones"``: made anew in each run; None: of a scalar.
        retain: whether the backward pass keeps the graph.
        kept: what else their script holds while it measures.
        only_full: whether their script measures forward and backward together whatever the row's mode says.
    """

    forward: Callable[[], Any]
    inputs: Outputs = ()
    gradients: Outputs | str | None = None
    retain: bool = True
    kept: tuple[Any, ...] = field(default=())
    only_full: bool = False

    def full(self) -> None:
        """Forward and backward."""
        self._backward(self.forward(), self.gradients)

    def only_forward(self) -> None:
        """The result is dropped, with its graph."""
        self.forward()

    def only_backward(self) -> Callable[[], None]:
        """One forward pass, of which the backward pass is then run again and again."""
        outputs = self.forward()
        gradients = (torch.randn_like(outputs),) if self.gradients == "random" else self.gradients
        return lambda: self._backward(outputs, gradients)

    def _backward(self, outputs: Any, gradients: Any) -> None:
        if gradients == "random":
            gradients = (torch.randn_like(outputs),)
        elif gradients == "ones":
            gradients = (torch.ones_like(outputs),)
        if self.inputs:
            torch.autograd.grad(outputs, self.inputs, gradients, allow_unused=True, retain_graph=self.retain)
        else:
            torch.autograd.backward(outputs, gradients, retain_graph=self.retain)
