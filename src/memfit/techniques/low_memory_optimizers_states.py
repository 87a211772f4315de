"""One optimizer object that becomes another: class, attributes, groups and state; and back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memfit.techniques.optimizer_step import Closure, Inner, parameters_of, replace_step

_STAYS = ("state", "param_groups", "step", "_opt_called")
_SHARED_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_BLOCK = 256
"""Elements for each scale in bitsandbytes."""


def made_like(kind: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """A ``kind`` over the same parameters in the same groups, with the settings that both know."""
    takes = inspect.signature(kind).parameters
    known = [key for key in _SHARED_SETTINGS if key in takes]
    if kind is torch.optim.Adafactor:
        known.remove("eps")  # a pair there, of another meaning
    groups = []
    for group in optimizer.param_groups:
        settings = {key: group[key] for key in known if key in group}
        settings["lr"] = float(settings["lr"])
        groups.append({"params": group["params"], **settings})
    first = {key: value for key, value in groups[0].items() if key != "params"}
    return kind(groups, **first)


def become(
    optimizer: Optimizer, made: Optimizer, *, compiled: bool | None
) -> Callable[[Optimizer | None], None]:
    """Lets ``optimizer`` be what ``made`` is; gives back what lets it be its old self.

    Moments go along where both keep Adam's.
    """
    old_class, old_vars = type(optimizer), dict(vars(optimizer))
    old_groups = [dict(group) for group in optimizer.param_groups]
    old_state = {p: dict(state) for p, state in optimizer.state.items()}
    for key in [key for key in vars(optimizer) if not _stays(key)]:
        del vars(optimizer)[key]
    vars(optimizer).update({key: value for key, value in vars(made).items() if not _stays(key)})
    for group, new in zip(optimizer.param_groups, made.param_groups, strict=True):
        group.update({key: value for key, value in new.items() if key != "params"})
    optimizer.__class__ = type(made)
    _lower_states(optimizer)
    step_back = replace_step(optimizer, _stepping(compiled))
    touched: list[bool] = []
    watch = optimizer.register_step_post_hook(lambda *_: touched.append(True) if not touched else None)

    def back(changed: Optimizer | None) -> None:
        if changed is None:
            return
        step_back()
        watch.remove()
        if touched:
            _raise_states(changed, old_class)
        else:
            changed.state.clear()
            changed.state.update(old_state)
        for key in [key for key in vars(changed) if not _stays(key)]:
            del vars(changed)[key]
        vars(changed).update({key: value for key, value in old_vars.items() if not _stays(key)})
        for group, old in zip(changed.param_groups, old_groups, strict=True):
            _regroup(group, old)
        changed.__class__ = old_class

    return back


def _stays(key: str) -> bool:
    return key in _STAYS or key.endswith("_hooks")


def _regroup(group: dict[str, Any], old: Mapping[str, Any]) -> None:
    """The old settings, with the learning rate of now."""
    rate, params = group["lr"], group["params"]
    was = old["lr"]
    same = float(torch.tensor(float(was))) == float(rate) or float(was) == float(rate)
    started = group.get("initial_lr", old.get("initial_lr"))
    group.clear()
    group.update(old, params=params, lr=was if same else float(rate))
    if started is not None:
        group["initial_lr"] = started


def _stepping(compiled: bool | None) -> Callable[[Optimizer, Inner, Closure], Any]:
    """torchao's step compiles itself and wants its learning rate as a tensor."""

    def step(optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
        if not type(optimizer).__module__.startswith("torchao"):
            return inner(closure)
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)
        with _eager(optimizer, compiled):
            return inner(closure)

    return step


@contextlib.contextmanager
def _eager(optimizer: Optimizer, compiled: bool | None) -> Iterator[None]:
    on_cuda = any(parameter.is_cuda for _, parameter in parameters_of(optimizer))
    if on_cuda if compiled is None else compiled:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


# -- states -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _lower_states(optimizer: Optimizer) -> None:
    """Adam's moments in the form of the optimizer that this has become."""
    for group, parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter)
        if state and "exp_avg" in state:
            if hasattr(optimizer, "_new_buffer"):
                _lower_torchao(optimizer, parameter, state)
            elif hasattr(optimizer, "init_state"):
                _lower_bitsandbytes(optimizer, group, parameter, dict(state))


def _lower_torchao(optimizer: Any, parameter: Tensor, state: dict[str, Any]) -> None:
    new = {}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        new[name] = optimizer._new_buffer(parameter, signed)
        new[name].copy_(state[name])
    optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **new}


def _lower_bitsandbytes(
    optimizer: Any, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]
) -> None:
    from bitsandbytes.functional import quantize_blockwise

    optimizer.state[parameter] = {}
    optimizer.init_state(group, parameter, 0, 0)
    new = optimizer.state[parameter]
    new["step"] = int(state["step"])
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        buffer = new[f"state{number}"]
        if buffer.dtype == torch.float32:
            buffer.copy_(state[name])
            continue
        table = new[f"qmap{number}"]
        codes, quantized = quantize_blockwise(state[name].float(), code=table, blocksize=_BLOCK)
        buffer.copy_(codes)
        new[f"absmax{number}"].copy_(quantized.absmax)


@torch.no_grad()
def _raise_states(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """The moments in 32 bit again, for an optimizer of ``kind``; none where it keeps others."""
    for parameter, state in list(optimizer.state.items()):
        raised = _raised(state) if issubclass(kind, torch.optim.Adam) else None
        if raised is None:
            del optimizer.state[parameter]
        else:
            moments = {name: value.to(parameter.dtype) for name, value in raised.items()}
            optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **moments}


def _raised(state: Mapping[str, Any]) -> dict[str, Tensor] | None:
    if "exp_avg_sq" in state:
        return {
            name: state[name].dequantize()
            if hasattr(state[name], "dequantize") and hasattr(state[name], "codes")
            else state[name]
            for name in ("exp_avg", "exp_avg_sq")
        }
    if "state2" not in state:
        return None
    return {"exp_avg": _raised_buffer(state, 1), "exp_avg_sq": _raised_buffer(state, 2)}


def _raised_buffer(state: Mapping[str, Any], number: int) -> Tensor:
    from bitsandbytes.functional import dequantize_blockwise

    buffer: Tensor = state[f"state{number}"]
    if f"absmax{number}" not in state:  # small tensors' states are not quantized
        return buffer.float()
    raised: Tensor = dequantize_blockwise(
        buffer, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_BLOCK
    )
    return raised
