"""A workload: how to build what is trained, as factories, so that it can be built on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memfit.core.errors import UsageError

Precision = Literal["fp32", "bf16-autocast", "fp16-autocast"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How to build one training step.

    The factories are called inside ``torch.device(device)`` and their results are then moved to that device.
    Each may take ``size="full" | "small"``; the small form is what `verify` runs for real on the CPU.

    Args:
        name: what reports call it.
        model: ``() -> torch.nn.Module``.
        batch: ``() -> batch``, any nesting of tensors; dimension 0 of every tensor is the sample dimension.
        loss: ``(model, batch) -> scalar tensor``, a mean over the samples (or tokens) of the batch.
        optimizer: ``(parameters) -> torch.optim.Optimizer``; ``None`` is ``torch.optim.AdamW`` by its
            defaults.
        precision: ``"fp32"`` (as built), ``"bf16-autocast"`` or ``"fp16-autocast"`` around the forward pass.
        loss_weight: ``(batch) -> float``, over how many samples or tokens ``loss`` takes its mean; needed to
            weight micro-batches that differ. ``None``: the size of dimension 0.
        spec: the text that this workload was loaded from (``"hf:gpt2,batch=8"``, ``"a.py:workload"``), if
            any.

    Examples:
        >>> import torch
        >>> from memfit import Workload
        >>> toy = Workload(
        ...     name="toy",
        ...     model=lambda: torch.nn.Linear(64, 10),
        ...     batch=lambda: (torch.randn(32, 64), torch.zeros(32, dtype=torch.long)),
        ...     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        ... )
    """

    name: str
    model: Callable[..., Any]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any] | None = None
    precision: Precision = "fp32"
    loss_weight: Callable[[Any], float] | None = None
    spec: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision {self.precision!r} of workload {self.name!r}: use one of {', '.join(PRECISIONS)}"
            )
        for part in ("model", "batch", "loss"):
            if not callable(getattr(self, part)):
                raise UsageError(
                    f"{part} of workload {self.name!r} must be a function, not {getattr(self, part)!r}"
                )
