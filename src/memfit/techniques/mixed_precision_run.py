"""What runs while mixed precision is applied: losses scaled, steps in the one right order, mistakes named.

The order is unscale → look for overflows → clip → step → update of the scale. It is kept in the optimizer's
own ``step``, so that a training loop needs no more than ``scale_loss(loss).backward()`` and
``optimizer.step()``. Which gradients are scaled is known from each parameter's ``.grad`` and its version
counter, noted when a scaled backward pass ends: a gradient that another backward pass or a clip changed after
that is found at the step.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo
from memfit.techniques.mixed_precision_scaler import LossScale, all_finite, unscale
from memfit.techniques.optimizer_step import Closure, Inner, evaluated, parameters_of, replace_step

_Seen = dict[int, tuple[weakref.ref[Tensor], int]]
"""By parameter (its ``id``): the gradient that the last scaled backward pass left, and its version."""


class _Member:
    """What is known of one optimizer between two of its steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.seen: _Seen = {}
        self.pending = False
        self.unscaled = False
        self.overflowed = False

    def parameters(self) -> list[Tensor]:
        optimizer = self.optimizer()
        return [] if optimizer is None else [p for _, p in parameters_of(optimizer)]

    def look(self) -> None:
        """Notes the gradients as they are now."""
        now: _Seen = {}
        for parameter in self.parameters():
            if parameter.grad is not None:
                now[id(parameter)] = (weakref.ref(parameter.grad), parameter.grad._version)
        self.pending = self.pending or not _same(now, self.seen)
        self.seen = now

    def changed(self) -> bool:
        """Whether a gradient is another, or was changed in place, since `look`."""
        return any(
            (known := self.seen.get(id(parameter))) is None
            or known[0]() is not parameter.grad
            or known[1] != parameter.grad._version
            for parameter in self.parameters()
            if parameter.grad is not None
        )

    def done(self) -> None:
        self.seen, self.pending, self.unscaled, self.overflowed = {}, False, False, False
        for parameter in self.parameters():  # what stays must not look new at the next backward pass
            if parameter.grad is not None:
                self.seen[id(parameter)] = (weakref.ref(parameter.grad), parameter.grad._version)


def _same(a: _Seen, b: _Seen) -> bool:
    return a.keys() == b.keys() and all(a[key][0]() is b[key][0]() and a[key][1] == b[key][1] for key in a)


class MixedPrecisionRun:
    """The state of one `MixedPrecisionTraining` object: its models' device, its scale, its optimizers.

    Args:
        scale: the dynamic loss scale; ``None`` where the type needs none (bf16).
        max_grad_norm: every step clips to this norm, after unscaling; ``None``: no clipping.
        device: the kind of device that the models are on.
        dtype: what products run in.
    """

    def __init__(
        self, scale: LossScale | None, max_grad_norm: float | None, device: str, dtype: torch.dtype
    ) -> None:
        self.scale = scale
        self.max_grad_norm = max_grad_norm
        self.device, self.dtype = device, dtype
        self.resting: list[bool] = []
        self.models: list[weakref.ref[nn.Module]] = []
        self._members: list[_Member] = []
        self._overflow_waits = False

    # -- losses ---------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; its backward pass is known as a scaled one."""
        if self.scale is None:
            return loss
        if torch.compiler.is_compiling():
            return loss * self.scale.scale
        scaled: Tensor = _ScaleLoss.apply(loss, self.scale.scale, self._backward_ended)
        return scaled

    def _backward_ended(self) -> None:
        for member in self._living():
            if member.unscaled and member.changed():
                raise UsageError(
                    "mixed_precision: a backward pass after the gradients were unscaled (by clip_grad_norm_ "
                    "or unscale_) adds scaled gradients to unscaled ones; unscale once, after the last "
                    "micro-batch"
                )
            member.look()

    # -- optimizers -----------------------------------------------------------------------------------------

    def add(self, optimizers: Sequence[Optimizer]) -> Undo:
        """Puts the steps of ``optimizers`` in order; gives back what takes that back."""
        members = [_Member(optimizer) for optimizer in optimizers]
        undos = [replace_step(o, self._body(m)) for o, m in zip(optimizers, members, strict=True)]
        self._members += members

        def undo() -> None:
            for take_back in undos:
                take_back()
            self._members = [m for m in self._members if m not in members]

        return undo

    def unscale_(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides the gradients by the scale, once for each step."""
        for optimizer in optimizers:
            self._unscale(self._member(optimizer))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscales where need be, then clips; the norm before clipping."""
        chosen = list(parameters)
        wanted = {id(parameter) for parameter in chosen}
        touched = [m for m in self._living() if wanted & {id(p) for p in m.parameters()}]
        for member in touched:
            self._unscale(member)
        norm = clip(chosen, max_norm, norm_type, self._names())
        for member in touched:
            member.look()
        return norm

    def _body(self, member: _Member) -> Callable[[Optimizer, Inner, Closure], Any]:
        def step(optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
            if self.scale is None and self.max_grad_norm is None:
                return inner(closure)
            _refuse_closure(optimizer, closure)
            loss = evaluated(closure)
            result = self._step_scaled(member, inner) if self.scale is not None else self._clip(member, inner)
            return result if loss is None else loss

        return step

    def _step_scaled(self, member: _Member, inner: Inner) -> Any:
        _refuse_grad_scaler()
        if all(parameter.grad is None for parameter in member.parameters()):
            return inner(None)
        self._unscale(member)
        if member.changed() and not all_finite(member.parameters()):
            member.overflowed = True
        result = None
        if not member.overflowed:
            result = self._clip(member, inner)
        self._overflow_waits = self._overflow_waits or member.overflowed
        member.done()
        if not any(other.pending for other in self._living()):
            assert self.scale is not None
            self.scale.update(self._overflow_waits)
            self._overflow_waits = False
        return result

    def _clip(self, member: _Member, inner: Inner) -> Any:
        if self.max_grad_norm is not None:
            clip(member.parameters(), self.max_grad_norm, names=self._names())
        return inner(None)

    def _unscale(self, member: _Member) -> None:
        if self.scale is None or member.unscaled:
            return
        if not member.pending:
            raise UsageError(
                "mixed_precision: this step has no scaled gradients: run mp.scale_loss(loss).backward() "
                "before each optimizer.step() (and step once after it: the gradients of a step are not "
                "scaled any more)"
            )
        if member.changed():
            raise UsageError(
                f"mixed_precision: gradients were changed while they were scaled by {self.scale.scale:g}: by "
                "clip_grad_norm_ or clip_grad_value_, by a backward pass without mp.scale_loss, or by a "
                "GradScaler. Clip with mp.clip_grad_norm_(parameters, max_norm) or max_grad_norm=, or call "
                "mp.unscale_(optimizer) before changing gradients"
            )
        member.overflowed = unscale(member.parameters(), self.scale.scale)
        member.unscaled = True
        member.look()

    def _names(self) -> dict[int, str]:
        models = [model for reference in self.models if (model := reference()) is not None]
        return {id(p): name for model in models for name, p in model.named_parameters()}

    def _member(self, optimizer: Optimizer) -> _Member:
        for member in self._living():
            if member.optimizer() is optimizer:
                return member
        raise UsageError(
            f"mixed_precision is not applied to this {type(optimizer).__name__}: mp.apply(model, optimizer)"
        )

    def forget_gradients(self) -> None:
        """Starts every optimizer's step anew."""
        for member in self._living():
            member.done()

    def remembered(self) -> Undo:
        """Gives back what puts the scale back as it is now, and starts every optimizer's step anew."""
        before = copy.deepcopy(vars(self.scale)) if self.scale is not None else {}

        def put_back() -> None:
            if self.scale is not None:
                vars(self.scale).update(copy.deepcopy(before))
            self._overflow_waits = False
            self.forget_gradients()

        return put_back

    def optimizers(self) -> list[Optimizer]:
        """The optimizers whose steps are in order now."""
        return [o for member in self._members if (o := member.optimizer()) is not None]

    def _living(self) -> Iterator[_Member]:
        return (member for member in list(self._members) if member.optimizer() is not None)


class _ScaleLoss(torch.autograd.Function):
    """Multiplies a loss; tells when a backward pass through it is over.

    Twice over a callback: those that DistributedDataParallel queues during the pass run between."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, ended: Callable[[], None]) -> Tensor:
        ctx.scale, ctx.ended = scale, ended
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        ended = ctx.ended
        queue(lambda: queue(ended))
        return gradients[0] * ctx.scale, None, None


def clip(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    names: Mapping[int, str] = MappingProxyType({}),
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` that says which gradient it cannot clip."""
    chosen = [p for p in parameters if p.grad is not None]
    for parameter in chosen:
        if parameter.grad is not None and parameter.grad.is_sparse:
            name = names.get(id(parameter), "a parameter")
            raise UsageError(
                f"sparse gradients cannot be clipped by norm: that of {name}, of shape "
                f"{tuple(parameter.shape)}, is sparse (an embedding with sparse=True); clip the others"
            )
    return nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)


def _refuse_closure(optimizer: Optimizer, closure: Closure) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and closure is not None:
        raise UsageError(
            "mixed_precision: LBFGS evaluates the loss several times within one step, so its gradients "
            "cannot be unscaled and clipped once; use bf16 without max_grad_norm, or another optimizer"
        )


def _refuse_grad_scaler() -> None:
    """UsageError when `torch.amp.GradScaler` calls this step: losses would be scaled twice."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return
        frame = frame.f_back
        caller = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            raise UsageError(
                "mixed_precision: a torch.amp.GradScaler calls this step, but mp scales losses by itself: "
                "call optimizer.step() and drop the GradScaler"
            )
