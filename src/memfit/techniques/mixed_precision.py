"""Mixed precision: products in fp16 or bf16, what needs it in fp32, losses scaled, steps in the right
order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, applied_techniques, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.bf16_weights import BFloat16Weights, Moments, Rounding
    from memfit.techniques.mixed_precision_run import MixedPrecisionRun
    from memfit.techniques.saving import Saving

PrecisionChoice = Literal["fp16", "bf16", "auto"]
PRECISION_CHOICES: tuple[PrecisionChoice, ...] = get_args(PrecisionChoice)

_RUNS: dict[int, MixedPrecisionRun] = {}
"""By the ``id`` of the technique object: what runs for the models that it is applied to."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionTraining(Technique):
    """Runs the forward pass in fp16 or bf16 under autocast, with dynamic loss scaling for fp16.

        mp = MixedPrecisionTraining(precision="fp16")
        model, optimizer = mp.apply(model, optimizer)
        with mp.autocast():
            loss = loss_function(model(x), y)
        mp.scale_loss(loss).backward()
        optimizer.step()

    ``optimizer.step()`` unscales, looks for overflows (then nothing is stepped, and the scale halves), clips
    and steps; a wrong order is an error that says so. The model runs in low precision without ``autocast()``
    too; that context takes the loss in. Works with micro-batches (scale each piece's loss), closures, several
    optimizers (``apply(model, [a, b])``, or one object applied to several models), schedulers,
    ``torch.compile`` and DistributedDataParallel.

    Args:
        precision: ``"auto"`` is bf16 where the device computes in it, else fp16; `choose` measures on a
            batch.
        keep_fp32: further modules that stay in fp32, by patterns over module names (``"*.norm"``,
            ``"lm_head"``, ``"router"`` for any module of that last name) or tensor names; normalizations,
            softmax, losses and routers always do.
        max_grad_norm: every step clips the unscaled gradients to this norm.
        initial_scale: of fp16's losses.
        growth_interval: after how many steps without an overflow the scale doubles.
        weights: ``"bf16"`` holds the weights in bf16 only (with ``precision="bf16"``).
        rounding: how small updates survive then: ``"split"``, ``"kahan"``, ``"stochastic"``, or ``"nearest"``
            for not at all (see `memfit.techniques.bf16_weights`).
        moments: the type of the optimizer's state then.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> mp = MixedPrecisionTraining(precision="fp16", initial_scale=1024.0)
        >>> model, optimizer = mp.apply(model, optimizer)
        >>> with mp.autocast():
        ...     loss = torch.nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1))
        >>> mp.scale_loss(loss).backward()
        >>> optimizer.step()
        >>> mp.scale, mp.skipped_steps
        (1024.0, 0)
    """

    name: ClassVar[str] = "mixed_precision"

    precision: PrecisionChoice = "auto"
    keep_fp32: Sequence[str] = ()
    max_grad_norm: float | None = None
    initial_scale: float = 65536.0
    growth_interval: int = 2000
    weights: Literal["fp32", "bf16"] = "fp32"
    rounding: Rounding = "split"
    moments: Moments = "bf16"

    def __post_init__(self) -> None:
        from memfit.techniques.bf16_weights import MOMENTS, ROUNDINGS

        choices = {"precision": PRECISION_CHOICES, "weights": ("fp32", "bf16")}
        choices |= {"rounding": ROUNDINGS, "moments": MOMENTS}
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise UsageError(
                    f"{self.name}: {key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}"
                )
        if isinstance(self.keep_fp32, str) or not all(isinstance(p, str) for p in self.keep_fp32):
            raise UsageError(f"{self.name}: keep_fp32 must be a list of names, not {self.keep_fp32!r}")
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if self.weights == "bf16" and self.precision == "fp16":
            raise UsageError(f"{self.name}: weights='bf16' needs precision='bf16', not 'fp16'")
        for key in ("max_grad_norm", "initial_scale", "growth_interval"):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise UsageError(f"{self.name}: {key} must be above 0, not {value!r}")

    def exactness(self, model: nn.Module) -> Exactness:
        return "approximate"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Activations by the type that autocast gives them; weights and states with ``weights="bf16"``."""
        from memfit.techniques.mixed_precision_estimate import estimate

        return estimate(self, graph)

    def choose(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        tolerance: float = 0.02,
    ) -> Self:
        """The same settings with precision and ``keep_fp32`` chosen by measurement on ``batch``.

        Each module that multiplies runs once in low precision on its own fp32 inputs; those whose output is
        off by more than ``tolerance`` (of its norm), or not finite, stay in fp32. With ``precision="auto"``
        the type that leaves fewer of them is taken, bf16 where both are equal.
        """
        from memfit.techniques.mixed_precision_choice import choose

        precision, kept = choose(self, model, batch, loss, tolerance)
        return replace(self, precision=precision, keep_fp32=(*self.keep_fp32, *kept))

    def change(self, model: nn.Module, optimizer: Any) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.mixed_precision_policy import kept_modules

        refuse_second(model, MixedPrecisionTraining)
        refuse_combination(model, self)
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = [each for each in optimizers if each is not None]
        device = device_type(model)
        low = self._precision_on(device)
        _refuse_unfit(self, model, optimizers, low)
        kept = kept_modules(model, self.keep_fp32)
        held = self._lowered(model, optimizers, kept) if self.weights == "bf16" else None
        run = self._run_for(model, low)
        undos = [] if held is None else [held.apply(optimizers)]
        undos.append(run.add(optimizers))
        undos.append(_set_forwards(model, kept, run))
        reference = weakref.ref(bare_model(model))

        def undo() -> None:
            for take_back in reversed(undos):
                take_back()
            run.models = [model for model in run.models if model is not reference and model() is not None]
            if not run.models:
                _RUNS.pop(id(self), None)

        return undo

    # -- while it is applied --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def autocast(self, enabled: bool = True) -> Iterator[None]:
        """The low-precision region of forward pass and loss. ``enabled=False``: a region in fp32, for an
        evaluation that must be."""
        from memfit.techniques.mixed_precision_policy import low_precision

        run = self._run()
        if enabled:
            with low_precision(run.device, run.dtype):
                yield
            return
        run.resting.append(True)
        try:
            with _no_autocast(run.device):
                yield
        finally:
            run.resting.pop()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward()`` on: scaled for fp16, itself for bf16."""
        return self._run().scale_loss(loss)

    def unscale_(self, optimizer: Optimizer | None = None) -> None:
        """Unscales now what ``optimizer.step()`` would unscale, for looking at or changing gradients."""
        run = self._run()
        run.unscale_([optimizer] if optimizer is not None else run.optimizers())

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` on unscaled gradients; the norm before clipping."""
        return self._run().clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled: in fp16."""
        return self._run().scale is not None

    @property
    def scale(self) -> float:
        """What losses are multiplied with now; 1 for bf16."""
        scale = self._run().scale
        return 1.0 if scale is None else scale.scale

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because a gradient overflowed."""
        scale = self._run().scale
        return 0 if scale is None else scale.skipped_steps

    @property
    def scale_history(self) -> tuple[tuple[int, float], ...]:
        """``(update, scale)``, at the start and at each change."""
        scale = self._run().scale
        return ((0, 1.0),) if scale is None else tuple(scale.history)

    def forget_gradients(self) -> None:
        """The gradients of now do not count: the step that they were for runs again from its start."""
        self._run().forget_gradients()

    def remembered(self) -> Undo:
        """Gives back what puts the loss scale back as it is now, for a step that runs again."""
        return self._run().remembered()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale for a checkpoint; empty for bf16."""
        scale = self._run().scale
        return {} if scale is None else scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the scale of `state_dict`, or of a GradScaler's."""
        scale = self._run().scale
        if scale is not None:
            scale.load_state_dict(state)

    # -- inside ---------------------------------------------------------------------------------------------

    def _run(self) -> MixedPrecisionRun:
        run = _RUNS.get(id(self))
        if run is None:
            raise UsageError(f"{self.name}: apply it first: model, optimizer = mp.apply(model, optimizer)")
        return run

    def _run_for(self, model: nn.Module, low: str) -> MixedPrecisionRun:
        from memfit.techniques.mixed_precision_run import MixedPrecisionRun
        from memfit.techniques.mixed_precision_scaler import LossScale

        run = _RUNS.get(id(self))
        device, dtype = device_type(model), _dtype(low)
        if run is None or not any(model() is not None for model in run.models):
            scale = None
            if low == "fp16":
                scale = LossScale(scale=float(self.initial_scale), growth_interval=self.growth_interval)
            run = _RUNS[id(self)] = MixedPrecisionRun(scale, self.max_grad_norm, device, dtype)
            weakref.finalize(self, _RUNS.pop, id(self), None)
        elif (run.device, run.dtype) != (device, dtype):
            raise UsageError(
                f"{self.name}: this object runs a model on {run.device}; make another for {device}"
            )
        run.models.append(weakref.ref(bare_model(model)))
        return run

    def _precision_on(self, device: str) -> Literal["fp16", "bf16"]:
        return best_precision(device) if self.precision == "auto" else self.precision

    def _lowered(
        self, model: nn.Module, optimizers: Sequence[Optimizer], kept: Mapping[str, nn.Module]
    ) -> BFloat16Weights:
        from torch.nn.modules.batchnorm import _NormBase

        from memfit.techniques.bf16_weights import BFloat16Weights

        # bitsandbytes' 4-bit layers set their bias to their input's type in each forward
        own_types = [
            m for m in model.modules() if isinstance(m, _NormBase) or type(m).__name__ == "Linear4bit"
        ]
        keep = [p for module in (*kept.values(), *own_types) for p in module.parameters()]
        return BFloat16Weights(model, optimizers, keep, self.rounding, self.moments)


def mixed_precision_of(model: nn.Module) -> MixedPrecisionTraining | None:
    """The mixed precision that is applied to ``model``, if any: a training loop asks it to scale its loss."""
    found = [t for t in applied_techniques(model) if isinstance(t, MixedPrecisionTraining)]
    return found[-1] if found else None


def best_precision(device: str) -> Literal["fp16", "bf16"]:
    """bf16 where the device computes in it by itself, else fp16 (CUDA devices before Ampere)."""
    import torch

    if device != "cuda":
        return "bf16"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def device_type(model: nn.Module) -> str:
    """The kind of device that the model's parameters are on."""
    return next((p.device.type for p in model.parameters()), "cpu")


def _dtype(low: str) -> Any:
    import torch

    return torch.float16 if low == "fp16" else torch.bfloat16


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    from memfit.techniques.autocast_state import without_autocast

    return without_autocast(device)


def _set_forwards(model: nn.Module, kept: Mapping[str, nn.Module], run: MixedPrecisionRun) -> Undo:
    from memfit.techniques.mixed_precision_policy import FullPrecisionForward, LowPrecisionForward
    from memfit.techniques.replaced_forward import set_forwards

    root = bare_model(model)
    modules = {id(module): module for module in kept.values() if module is not root}
    forwards: list[Any] = [
        (module, FullPrecisionForward(module, vars(module).get("forward"))) for module in modules.values()
    ]
    whole = LowPrecisionForward(root, vars(root).get("forward"), run.device, run.dtype, run.resting)
    return set_forwards([*forwards, (root, whole)], "mixed precision")


def _refuse_unfit(mp: MixedPrecisionTraining, model: nn.Module, optimizers: Sequence[Any], low: str) -> None:
    """Raises UsageError for what cannot work, before anything is changed."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    needs = [
        reason
        for reason, asked in (
            ("fp16 scales losses", low == "fp16"),
            ("max_grad_norm clips before each step", mp.max_grad_norm is not None),
            ("weights='bf16' steps them", mp.weights == "bf16"),
        )
        if asked
    ]
    if needs and not optimizers:
        raise UsageError(f"{mp.name}: {needs[0]}, so it needs the optimizer: mp.apply(model, optimizer)")
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise UsageError(f"{mp.name}: weights in fp16 lose small updates; keep them in fp32 (model.float())")
    if low == "fp16" and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise UsageError(f"{mp.name}: weights in bf16 do not go with precision 'fp16'; take 'bf16'")
    if mp.weights == "bf16" and isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"{mp.name}: weights='bf16' changes the type of weights whose gradients DistributedDataParallel "
            "has laid out already; apply it before wrapping the model"
        )
