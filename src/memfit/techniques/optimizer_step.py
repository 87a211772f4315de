"""An optimizer's ``step`` replaced in place, and one parameter's share of a step.

The optimizer object stays: learning-rate schedulers, wrappers and the user's own references go on working.
Replacements stack, as those of a module's forward do; a scheduler may be made before or after.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Closure = Callable[[], Any] | None
Inner = Callable[[Closure], Any]
Body = Callable[["Optimizer", Inner, Closure], Any]
"""What runs in place of ``step``: (optimizer, what ran before, closure) → what ``step`` returns."""

_SCHEDULER_MARK = "_wrapped_by_lr_sched"
"""What PyTorch's schedulers set on the step that they wrap, to tell later whether it was called."""


def replace_step(optimizer: Optimizer, body: Body) -> Undo:
    """Lets ``body`` run whenever ``optimizer.step`` is called; gives back what takes that back."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise UsageError(f"an optimizer is needed (torch.optim), not a {type(optimizer).__name__}")
    previous = vars(optimizer).get("step")
    scheduled = hasattr(previous, _SCHEDULER_MARK)
    active = [body]

    def run(self: Optimizer, closure: Closure = None) -> Any:
        if scheduled:
            self._opt_called = True  # type: ignore[attr-defined]
        before = type(self).step.__get__(self) if previous is None or scheduled else previous

        def inner(closure: Closure) -> Any:
            return before() if closure is None else before(closure)

        return active[0](self, inner, closure) if active else inner(closure)

    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(closure: Closure = None) -> Any:
        return run(_alive(reference), closure)

    step.__func__ = run  # type: ignore[attr-defined]  # as a bound method has: schedulers ask for it
    if scheduled:
        setattr(step, _SCHEDULER_MARK, True)
    optimizer.step = step  # type: ignore[method-assign]

    def undo() -> None:
        active.clear()
        changed = reference()
        if changed is not None and vars(changed).get("step") is step:
            del changed.step
            if previous is not None:
                changed.step = previous  # type: ignore[method-assign]

    return undo


def _alive(reference: weakref.ref[Optimizer]) -> Optimizer:
    optimizer = reference()
    assert optimizer is not None, "a step outlived its optimizer"
    return optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each parameter with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def step_one(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs the optimizer's own step on one parameter alone, by its group's settings of this moment.

    Optimizers treat each parameter by itself, so all parameters one after another are the whole step.

    Args:
        parameter: takes part with its ``.grad``; need not be the optimizer's own.
        state: its state, when that is kept elsewhere than in ``optimizer.state``.

    Returns:
        the state after the step.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__.update(vars(optimizer))
    alone.__dict__.pop("step", None)
    alone._optimizer_step_pre_hooks, alone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    alone.param_groups = [{**group, "params": [parameter]}]
    alone.state = optimizer.state if state is None else defaultdict(dict, {parameter: state})
    type(optimizer).step(alone)
    result: dict[str, Any] = alone.state[parameter]
    return result


def step_each(optimizer: Optimizer, step: Callable[[dict[str, Any], Tensor], Any]) -> None:
    """Runs ``step`` for each parameter that has a gradient, between the optimizer's own step hooks."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})
    for group, parameter in list(parameters_of(optimizer)):
        if parameter.grad is not None:
            step(group, parameter)
    for after in list(optimizer._optimizer_step_post_hooks.values()):
        after(optimizer, (), {})


def evaluated(closure: Closure) -> Any:
    """The closure's loss, with gradients recorded; ``None`` without one."""
    import torch

    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_whole_step_optimizers(optimizer: Optimizer, technique: str) -> None:
    """UsageError for optimizers that look at all parameters together, or evaluate the loss several times."""
    import torch

    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"{technique}: LBFGS evaluates the loss several times in one step and treats all parameters as "
            "one vector; use an optimizer that treats each parameter by itself (AdamW, SGD …)"
        )
