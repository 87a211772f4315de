"""A loss scale that stays, for steps in fp16 that are compared: no gradient underflows, no step is skipped.

Scales are powers of two, so that scaling and unscaling are exact in binary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.step import TrainingStep
from memfit.planning.figures import Settings
from memfit.techniques.mixed_precision import MixedPrecisionTraining, mixed_precision_of
from memfit.techniques.mixed_precision_scaler import all_finite

SCALES = (2.0**15, 2.0**10, 2.0**5, 1.0)
"""The first of them with which no gradient overflows is used; all of them are numbers of fp16."""


class StaticLossScale:
    """In the place of a step's gradient scaler; of mixed precision's too, which then is asked to unscale.

    Attributes:
        overflowed: whether a gradient of any step so far was infinite or not a number.
    """

    def __init__(self, step: TrainingStep, scale: float, mixed: MixedPrecisionTraining | None) -> None:
        self._model, self._optimizer = step.model, step.optimizer
        self._scale, self._mixed = scale, mixed
        self.overflowed = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for ``backward()``, in fp32: a scaled one may be no number of fp16."""
        return loss.float() * self._scale if self._mixed is None else self._mixed.scale_loss(loss)

    def unscaled_gradients(self) -> dict[str, torch.Tensor]:
        """Unscales the gradients; copies of them by parameter, those of fp16 in fp32 where they cannot
        underflow."""
        self.overflowed = self.overflowed or not all_finite(self._model.parameters())
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        if self._mixed is not None:
            self._mixed.unscale_(self._optimizer)
            return {name: _copy(gradient) for name, gradient in gradients.items()}
        found = {name: _copy(gradient) / self._scale for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.div_(self._scale)
        return found

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step, never skipped here."""
        optimizer.step()

    def update(self) -> None:
        """Nothing: the scale stays."""


def scaled(step: TrainingStep, techniques: Sequence[Settings], scale: float) -> StaticLossScale | None:
    """Gives a step with its techniques applied the static scale where it computes in fp16; None, and no
    scaler at all, where it does not, or where optimizers step within the backward pass and see each gradient
    as it comes."""
    step.scaler = None
    mixed = mixed_precision_of(step.model)
    if mixed is not None and not mixed.scales_losses:
        mixed = None
    fp16 = step.workload.precision == "fp16-autocast" or any(
        parameter.dtype == torch.float16 for parameter in step.model.parameters()
    )
    if mixed is None and (not fp16 or steps_in_backward(techniques)):
        return None
    static = StaticLossScale(step, scale, mixed)
    step.scaler = static  # type: ignore[assignment]
    return static


def steps_in_backward(techniques: Sequence[Settings]) -> bool:
    """Whether gradients are used up before anything could unscale them."""
    return any(settings["technique"] == "optimizer_in_backward" for settings in techniques)


def with_scale(techniques: Sequence[Settings], scale: float) -> tuple[Settings, ...]:
    """The settings with mixed precision's scale begun, and kept, at ``scale``."""
    return tuple(
        {**settings, "initial_scale": scale} if settings["technique"] == "mixed_precision" else settings
        for settings in techniques
    )


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.float() if dense.dtype == torch.float16 else dense.clone()
