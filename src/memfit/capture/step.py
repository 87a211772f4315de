"""One training step of a workload, on any device: built once, run as often as asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memfit.core.errors import UsageError, WorkloadFailed
from memfit.core.workload import Workload

Size = Literal["full", "small"]
OnPhase = Callable[[str], None]

_AUTOCAST_DTYPES = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def _ignore_phase(phase: str) -> None:
    del phase


@dataclass(kw_only=True)
class TrainingStep:
    """The running state of one workload: model, optimizer, batch. `build_step` makes it.

    Attributes:
        micro_batches: into how many parts `run` splits the batch along dimension 0.
        scaler: the loss scaler, for ``fp16-autocast`` only.
    """

    workload: Workload
    device: torch.device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    micro_batches: int = 1
    scaler: torch.amp.GradScaler | None = None
    steps_done: int = field(default=0, init=False)

    def run(self, on_phase: OnPhase = _ignore_phase) -> None:
        """Forward, backward, ``optimizer.step()``, ``zero_grad(set_to_none=True)``: a plain training loop's
        turn.

        Nothing of the step is referenced afterwards, so its peak is that of the plain loop. With
        micro-batches the losses are weighted by `Workload.loss_weight`, so that the gradients are those of
        the whole batch.

        Args:
            on_phase: called with ``"forward"``, ``"backward"`` (once for each micro-batch), ``"optimizer"``
                and ``"other"`` as the phases begin.
        """
        self.forward_backward(on_phase)
        on_phase("optimizer")
        self.optimizer_step()
        on_phase("other")
        self.steps_done += 1

    def forward_backward(self, on_phase: OnPhase = _ignore_phase) -> None:
        """The gradients of the whole batch, added to ``.grad``."""
        if self.micro_batches == 1:
            self._forward_backward(self.batch, 1.0, on_phase)
            return
        weights = [self._weight(part) for part in split_batch(self.batch, self.micro_batches)]
        total = sum(weights) or 1.0
        for part, weight in zip(split_batch(self.batch, self.micro_batches), weights, strict=True):
            self._forward_backward(part, weight / total, on_phase)

    def optimizer_step(self) -> None:
        """``optimizer.step()`` through the loss scaler where there is one, then gradients set to ``None``."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass that the workload's precision asks for."""
        dtype = _AUTOCAST_DTYPES.get(self.workload.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _forward_backward(self, batch: Any, share: float, on_phase: OnPhase) -> None:
        on_phase("forward")
        with self.autocast():
            loss = self.workload.loss(self.model, batch)
        _check_loss(loss, self.workload.name)
        if share != 1.0:
            loss = loss * share
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        on_phase("backward")
        loss.backward()

    def _weight(self, batch: Any) -> float:
        weigh = self.workload.loss_weight
        return float(weigh(batch)) if weigh is not None else float(_batch_size(batch))


def build_step(
    workload: Workload,
    *,
    device: str | torch.device,
    size: Size = "full",
    micro_batches: int = 1,
    seed: int = 0,
) -> TrainingStep:
    """Builds model, optimizer and batch of ``workload`` on ``device``, in training mode.

    Args:
        device: ``"cuda"`` (a real or the made-up GPU), ``"cpu"`` or ``"meta"``.
        size: passed to those factories that take a ``size``; the others build what they always build.
        micro_batches: see `TrainingStep.micro_batches`.
        seed: of PyTorch's generators before the model is built, and again before the batch is.
    """
    device = torch.device(device)
    with device:
        torch.manual_seed(seed)
        model = _sized(workload.model, size)()
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"model() of workload {workload.name!r} must return a torch.nn.Module, "
                f"not {type(model).__name__}"
            )
    batch = build_batch(workload, device=device, size=size, seed=seed)
    model = model.to(device).train()
    step = TrainingStep(
        workload=workload,
        device=device,
        model=model,
        optimizer=_build_optimizer(workload, model),
        batch=batch,
        micro_batches=micro_batches,
        scaler=torch.amp.GradScaler(device.type) if workload.precision == "fp16-autocast" else None,
    )
    torch.manual_seed(seed + 2)
    return step


def build_batch(workload: Workload, *, device: str | torch.device, size: Size = "full", seed: int = 0) -> Any:
    """The batch of ``workload`` on ``device``, with the seed that `build_step` gives it."""
    device = torch.device(device)
    with device:
        torch.manual_seed(seed + 1)
        batch = _sized(workload.batch, size)()
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def takes_size(workload: Workload) -> bool:
    """Whether the workload has a small form: its model factory takes ``size``."""
    return _takes_size(workload.model)


def batch_takes_size(workload: Workload) -> bool:
    """Whether the batch has a small form, with which the whole model runs too: its factory takes ``size``."""
    return _takes_size(workload.batch)


def _takes_size(factory: Callable[..., Any]) -> bool:
    return "size" in inspect.signature(factory).parameters


def split_batch(batch: Any, parts: int) -> Iterator[Any]:
    """Splits every tensor of ``batch`` along dimension 0 into ``parts`` (views; the first ones longer by at
    most one).

    Raises UsageError when the tensors disagree about dimension 0 or there are fewer samples than parts.
    """
    samples = _batch_size(batch)
    if not 1 <= parts <= samples:
        raise UsageError(
            f"cannot split a batch of {samples} samples into {parts} micro-batches: use 1 to {samples}"
        )
    for part in range(parts):
        start, end = _bounds(samples, parts, part)
        yield tree_map(lambda leaf, a=start, b=end: leaf[a:b] if _is_split(leaf) else leaf, batch)


def _bounds(samples: int, parts: int, part: int) -> tuple[int, int]:
    whole, longer = divmod(samples, parts)
    start = part * whole + min(part, longer)
    return start, start + whole + (part < longer)


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _batch_size(batch: Any) -> int:
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if _is_split(leaf)}
    if len(sizes) != 1:
        raise UsageError(
            f"cannot tell the batch size: dimension 0 of the tensors is {sorted(sizes) or 'missing'}, "
            "and must be the sample dimension of each of them"
        )
    return int(sizes.pop())


def _sized(factory: Callable[..., Any], size: Size) -> Callable[[], Any]:
    return (lambda: factory(size=size)) if _takes_size(factory) else factory


def _build_optimizer(workload: Workload, model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise WorkloadFailed(
            f"the model of workload {workload.name!r} has no parameter that requires a gradient"
        )
    optimizer = (
        torch.optim.AdamW(parameters) if workload.optimizer is None else workload.optimizer(parameters)
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer() of workload {workload.name!r} must return a torch.optim.Optimizer, "
            f"not {type(optimizer).__name__}"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer() of workload {workload.name!r} returns {type(optimizer).__name__}, whose step needs "
            "a closure and runs the model several times; a workload is one forward and backward pass and "
            "one optimizer step. `memfit dryrun` measures a script that uses it"
        )
    return optimizer


def _check_loss(loss: Any, name: str) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise WorkloadFailed(
            f"loss() of workload {name!r} must return one number that requires a gradient, not {what}"
        )
