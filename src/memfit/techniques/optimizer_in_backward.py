"""The optimizer's step in the backward pass: each parameter is stepped when its gradient is complete, and the
gradient is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph, Storage
    from memfit.techniques.optimizer_step import Closure, Inner
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward(Technique):
    """Steps each parameter as soon as its gradient is there, by the optimizer's own code, and drops the
    gradient: no more than one gradient or two are alive at once.

    The loop stays as it is; ``optimizer.step()`` only ends the step. What needs all gradients at once cannot
    be: clipping by the norm of all (``clip_grad_norm_`` finds none), loss scaling (fp16), several backward
    passes for one step, gradients that ranks add up after the backward pass (DistributedDataParallel). Those
    that can be seen are refused.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = OptimizerInBackward().apply(model, optimizer)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> optimizer.step()
        >>> model.weight.grad is None
        True
    """

    name: ClassVar[str] = "optimizer_in_backward"

    def exactness(self, model: nn.Module) -> Exactness:
        """``exact`` on the CPU, whose optimizers go from parameter to parameter by themselves; elsewhere the
        optimizer's kernels for many parameters may add in another order."""
        on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
        return "exact" if on_host else "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Gradients die where they are made; the step's temporaries are those of one parameter."""
        from memfit.techniques.saving import saving_of

        saving = saving_of(graph, _storages(graph))
        return replace(saving, note="clipping by norm and gradient accumulation are not possible with it")

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.optimizer_step import parameters_of, replace_step

        refuse_second(model, OptimizerInBackward)
        refuse_combination(model, self)
        if optimizer is None:
            raise UsageError(f"{self.name} changes the optimizer: apply(model, optimizer)")
        _refuse_unfit(model, optimizer)
        running = _Running(optimizer)
        handles = [
            parameter.register_post_accumulate_grad_hook(running.hook(group))
            for group, parameter in parameters_of(optimizer)
            if parameter.requires_grad
        ]
        step_back = replace_step(optimizer, running.end)

        def undo() -> None:
            for handle in handles:
                handle.remove()
            step_back()

        return undo


class _Running:
    """Which parameters were stepped since the last ``optimizer.step()``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stepped: set[int] = set()

    def hook(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            import torch

            from memfit.techniques.optimizer_step import step_one

            optimizer = self._optimizer()
            if optimizer is None:
                return
            if id(parameter) in self._stepped:
                raise UsageError(
                    "optimizer_in_backward: a second backward pass before optimizer.step(): gradients "
                    "cannot be accumulated, as the first pass has stepped already; use one pass for each "
                    "step (after one that failed, optimizer.step() ends the step), or memfit.undo(model)"
                )
            _refuse_ranks(parameter)
            with torch.no_grad():
                step_one(optimizer, group, parameter)
            parameter.grad = None
            self._stepped.add(id(parameter))

        return step

    def end(self, optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
        """Hooks of the step run here; what the backward pass stepped has no gradient left."""
        from memfit.techniques.optimizer_step import evaluated, parameters_of, step_each, step_one

        loss = evaluated(closure)
        if any(p.grad is not None and id(p) in self._stepped for _, p in parameters_of(optimizer)):
            raise UsageError(
                "optimizer_in_backward: parameters have gradients again after their step, as "
                "DistributedDataParallel gives them back; use FSDP (fully_shard), which adds gradients first"
            )
        step_each(optimizer, lambda group, parameter: step_one(optimizer, group, parameter))
        self._stepped.clear()
        return loss


def _storages(graph: StepGraph) -> Iterator[Storage]:
    readers: dict[int, int] = {}
    for op in graph.ops:
        if op.phase == "backward":
            readers |= dict.fromkeys((*op.inputs, *op.mutates), op.index)
    for storage in graph.storages:
        if storage.category == "gradient" and storage.born >= 0:
            yield replace(storage, died=max(readers.get(storage.id, storage.born), storage.born))
        elif storage.category == "temporary" and graph.ops[storage.born].phase == "optimizer":
            continue
        else:
            yield storage


def _refuse_unfit(model: nn.Module, optimizer: Optimizer) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from memfit.techniques.optimizer_step import refuse_whole_step_optimizers

    refuse_whole_step_optimizers(optimizer, OptimizerInBackward.name)
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "optimizer_in_backward steps before DistributedDataParallel has added up the gradients of all "
            "ranks; use FSDP (fully_shard), which adds them first"
        )
    if any(parameter.grad is not None for parameter in bare_model(model).parameters()):
        raise UsageError("optimizer_in_backward: there are gradients already; optimizer.zero_grad() first")


def _refuse_ranks(parameter: Tensor) -> None:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size() > 1 and not hasattr(parameter, "to_local"):
        raise UsageError(
            "optimizer_in_backward steps before the gradients of other ranks are added; use FSDP "
            "(fully_shard)"
        )
