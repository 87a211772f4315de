"""Linear layer and cross entropy in one, chunk by chunk: the logits of all rows never exist at the same time.

The gradients of the inputs are formed in the forward pass, while a chunk's logits are there, so the backward
pass multiplies by the incoming gradient and nothing is computed twice. Where that cannot be
(``reduction="none"``, a second backward through the same graph) the chunks' logits are computed again.

The mathematics is that of ``cross_entropy(linear(hidden, weight, bias).float(), target)``; sums over rows
are split in chunks, so results differ from it in the order of floating-point sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.techniques.autocast_state import without_autocast

Reduction = Literal["mean", "sum", "none"]
Needs = tuple[bool, bool, bool]
"""Which of hidden rows, weight and bias get a gradient."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The settings of the loss, as ``torch.nn.functional.cross_entropy`` has them, and of the chunking.

    Args:
        compute_dtype: the type of the matrix products (autocast's, or the weight's own).
        chunks: how many pieces the rows are cut in.
        backend: what computes the chunks; Liger's kernel cuts by its own rule and knows no class weights.
    """

    compute_dtype: torch.dtype
    chunks: int
    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    backend: Literal["torch", "liger"] = "torch"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    terms: LossTerms,
    class_weight: Tensor | None = None,
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T + bias`` against ``target``.

    Args:
        hidden: rows × features.
        weight: classes × features.
        bias: classes.
        target: class index per row; rows with ``terms.ignore_index`` count for nothing.
        class_weight: a factor per class.

    Returns:
        a scalar, or one loss per row with ``reduction="none"``; float32, or float64 for float64 products.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, class_weight, terms)
    return loss


@dataclass(slots=True)
class _Sums:
    """What a pass over the chunks gathers: a loss per row, and the gradients of the sum of the rows'
    losses."""

    losses: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class _Problem:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    terms: LossTerms

    def row_weights(self) -> Tensor:
        """What each row counts: its class's weight, 0 for an ignored one."""
        valid = self.target != self.terms.ignore_index
        if self.class_weight is None:
            return valid.to(_loss_dtype(self.terms.compute_dtype))
        factors: Tensor = self.class_weight.to(_loss_dtype(self.terms.compute_dtype))
        return factors[self.target.where(valid, 0)] * valid

    def _empty_gradients(self, needs: Needs) -> _Sums:
        """Of the inputs that need one; the weight's in the weight's own type."""
        return _Sums(
            hidden=torch.empty_like(self.hidden) if needs[0] else None,
            weight=torch.zeros_like(self.weight, memory_format=torch.contiguous_format) if needs[1] else None,
            bias=torch.zeros_like(self.bias) if needs[2] and self.bias is not None else None,
        )

    def run(self, needs: Needs, *, row_scale: Tensor | None = None) -> _Sums:
        """Goes over the chunks. With ``row_scale`` the gradients are those of the scaled rows' sum."""
        if self.terms.backend == "liger":
            return self._run_in_kernels(needs, row_scale)
        sums = self._empty_gradients(needs)
        weight = self.weight.to(self.terms.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.terms.compute_dtype)
        for rows in self._chunks():
            hidden = self.hidden[rows].to(self.terms.compute_dtype)
            logits = F.linear(hidden, weight, bias).to(_loss_dtype(self.terms.compute_dtype))
            losses, scale = self._losses(logits, self.target[rows])
            sums.losses.append(losses)
            if any(needs):
                scale = scale if row_scale is None else scale * row_scale[rows]
                self._add_gradients(sums, rows, logits, hidden, weight, scale)
        return sums

    def _run_in_kernels(self, needs: Needs, row_scale: Tensor | None) -> _Sums:
        from memfit.techniques.liger_cross_entropy import rows_and_gradients

        losses, *gradients = rows_and_gradients(
            self.hidden,
            self.weight,
            self.bias,
            self.target,
            terms=self.terms,
            row_scale=row_scale,
            wanted=needs,
        )
        return _Sums([losses], *gradients)

    def _chunks(self) -> Iterator[slice]:
        count = self.hidden.shape[0]
        step = max(1, -(-count // self.terms.chunks))
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _losses(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' losses and the factor of their gradients; turns ``logits`` into those gradients in place.

        One buffer: logits → logits − max → exp → softmax → softmax − wanted distribution.
        """
        smoothing, classes = self.terms.label_smoothing, logits.shape[1]
        valid = target != self.terms.ignore_index
        wanted = target.where(valid, 0).unsqueeze(1)
        logits -= logits.amax(1, keepdim=True)
        of_target = logits.gather(1, wanted).squeeze(1)
        class_weight = None if self.class_weight is None else self.class_weight.to(logits.dtype)
        target_weight = (
            valid.to(logits.dtype) if class_weight is None else class_weight[wanted.squeeze(1)] * valid
        )
        mean_logit = None
        if smoothing:
            mean_logit = logits.sum(1) if class_weight is None else logits @ class_weight
        total = logits.exp_().sum(1)
        logits /= total.unsqueeze(1)
        losses = (total.log() - of_target) * target_weight
        if class_weight is not None and smoothing:
            return self._smoothed_and_weighted(logits, wanted, valid, losses, mean_logit, total, class_weight)
        if smoothing:
            assert mean_logit is not None
            losses = (1 - smoothing) * losses + smoothing / classes * (
                classes * total.log() - mean_logit
            ) * valid
            logits -= smoothing / classes
        logits.scatter_add_(1, wanted, logits.new_full((1, 1), smoothing - 1).expand_as(wanted))
        return losses, target_weight

    def _smoothed_and_weighted(
        self,
        logits: Tensor,
        wanted: Tensor,
        valid: Tensor,
        losses: Tensor,
        weighted_logit: Tensor | None,
        total: Tensor,
        class_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Both at once: the part that smoothing spreads over the classes is weighted class by class."""
        assert weighted_logit is not None
        share = self.terms.label_smoothing / logits.shape[1]
        spread = (class_weight.sum() * total.log() - weighted_logit) * valid
        of_target = (1 - self.terms.label_smoothing) * class_weight[wanted.squeeze(1)]
        logits *= (of_target + share * class_weight.sum()).unsqueeze(1)
        logits -= share * class_weight
        logits.scatter_add_(1, wanted, -of_target.unsqueeze(1))
        return (1 - self.terms.label_smoothing) * losses + share * spread, valid.to(logits.dtype)

    def _add_gradients(
        self, sums: _Sums, rows: slice, slope: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor
    ) -> None:
        """Adds a chunk's share. ``scale`` is per row, so it goes on the narrow factors, not on the logits'
        gradient."""
        if sums.bias is not None:
            sums.bias += (scale.to(slope.dtype) @ slope).to(sums.bias.dtype)
        slope = slope.to(hidden.dtype)
        column = scale.unsqueeze(1).to(hidden.dtype)
        if sums.hidden is not None:
            sums.hidden[rows] = (slope @ weight).mul_(column)
        if sums.weight is None:
            return
        if sums.weight.dtype == slope.dtype:
            torch.addmm(sums.weight, slope.T, hidden * column, out=sums.weight)
        else:
            sums.weight += slope.T @ (hidden * column)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        terms: LossTerms,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.terms = terms
        ctx.sums = None
        problem = _Problem(hidden, weight, bias, target, class_weight, terms)
        now = terms.reduction != "none"
        with without_autocast(hidden.device.type):
            needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
            sums = problem.run(needs if now else (False, False, False))
            losses = torch.cat(sums.losses)
            if not now:
                return losses
            ctx.sums, sums.losses = sums, []
            if terms.reduction == "sum":
                return torch.sum(losses)
            ctx.total = problem.row_weights().sum()
            return torch.div(torch.sum(losses), ctx.total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        terms: LossTerms = ctx.terms
        sums, ctx.sums = ctx.sums, None
        with without_autocast(grad.device.type):
            if sums is None:
                hidden, weight, bias, target, class_weight = ctx.saved_tensors
                problem = _Problem(hidden, weight, bias, target, class_weight, terms)
                needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
                per_row = grad if terms.reduction == "none" else None
                sums = problem.run(needs, row_scale=per_row)
            gradients = [sums.hidden, sums.weight, sums.bias]
            if terms.reduction != "none":
                # All rows ignored: the mean is 0/0, and its gradient zero, as PyTorch's is.
                factor = grad if terms.reduction == "sum" else (grad / ctx.total).where(ctx.total != 0, 0)
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(factor.to(gradient.device))
        return (*gradients, None, None, None)


def _loss_dtype(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute == torch.float64 else torch.float32
