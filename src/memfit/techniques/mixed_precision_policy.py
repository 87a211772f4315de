"""What stays in fp32 under mixed precision, and the forwards that see to it.

By default: normalizations, softmax and loss modules, and the routers of mixtures of experts. Batch norms are
left to PyTorch, whose kernels take half-precision inputs and compute and keep statistics in fp32. Patterns
add modules by name, or by the name of one of their tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memfit.core.errors import UsageError
from memfit.techniques.autocast_state import autocast_dtype, without_autocast
from memfit.techniques.replaced_forward import ReplacedForward

LOW = (torch.float16, torch.bfloat16)
_KEPT_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.Softmax, nn.LogSoftmax, _Loss)


def kept_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of ``model`` that stay in fp32, by name: those of the defaults and of ``patterns``.

    Raises:
        UsageError: a pattern that names nothing in this model.
    """
    named = dict(model.named_modules())
    kept = {name: module for name, module in named.items() if name and _stays(name, module)}
    for pattern in patterns:
        found = [name for name in named if name and _matches(name, pattern)]
        found += [name.rpartition(".")[0] for name in _tensor_names(model) if fnmatch.fnmatch(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern.strip("*."), [n for n in named if n], n=3, cutoff=0.3)
            raise UsageError(
                f"mixed_precision: keep_fp32 pattern {pattern!r} names no module and no tensor of this "
                f"{type(model).__name__}; near it are {', '.join(near) or 'none'}"
            )
        kept.update({name: named[name] for name in found if name})
    return {
        name: module for name, module in kept.items() if type(module).forward is not nn.Module.forward
    } | _members_of_containers(kept)


def _members_of_containers(kept: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """A container that is never called itself stays in fp32 by its members."""
    return {
        f"{name}.{inner}": member
        for name, module in kept.items()
        if type(module).forward is nn.Module.forward
        for inner, member in module.named_children()
    }


def _stays(name: str, module: nn.Module) -> bool:
    last, kind = name.rpartition(".")[2], type(module).__name__
    if isinstance(module, _KEPT_TYPES) or kind.endswith(("RMSNorm", "LayerNorm")) or "Router" in kind:
        return True
    if last == "gate" and isinstance(module, nn.Linear):  # one output for each expert
        return module.out_features < module.in_features
    return "router" in last and not any(True for _ in module.children())


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or name.rpartition(".")[2] == pattern


def _tensor_names(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in model.named_buffers(remove_duplicate=False):
        yield name


class FullPrecisionForward(ReplacedForward):
    """Runs a module in fp32 inside a low-precision region: no autocast, inputs in fp32.

    A module whose own parameters are 16 bit runs as it does without: there is nothing to keep in fp32.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = _device_type(args, kwargs)
        if device is None or autocast_dtype(device) is None or self._is_low():
            return self.original()(*args, **kwargs)
        args, kwargs = tree_map(_raised, (args, kwargs))
        with without_autocast(device):
            return self.original()(*args, **kwargs)

    def _is_low(self) -> bool:
        module = self._module()
        return module is not None and any(parameter.dtype in LOW for parameter in module.parameters())


class LowPrecisionForward(ReplacedForward):
    """Runs a whole model under autocast where none is on yet; its results then leave in fp32, so that a loss
    outside of the region is computed in fp32. Where the loss is among them they leave as they are."""

    def __init__(
        self,
        module: nn.Module,
        previous: Callable[..., Any] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        resting: Sequence[bool] = (),
    ) -> None:
        super().__init__(module, previous)
        self.device, self.dtype, self.resting = device, dtype, resting

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._previous, self.device, self.dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.resting or autocast_dtype(self.device) is not None:
            return self.original()(*args, **kwargs)
        with low_precision(self.device, self.dtype):
            output = self.original()(*args, **kwargs)
        if isinstance(getattr(output, "loss", None), torch.Tensor):
            return output  # transformers' way: nobody computes a loss of these logits again
        if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):  # none of pytree's
            raised = copy.copy(output)
            for field in dataclasses.fields(output):
                object.__setattr__(raised, field.name, tree_map(_raised, getattr(output, field.name)))
            return raised
        return tree_map(_raised, output)


@contextlib.contextmanager
def low_precision(device: str, dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast`; on the CPU, softmax and losses in fp32 as well, as CUDA's autocast has them."""
    with torch.autocast(device, dtype):
        if device != "cpu" or torch.compiler.is_compiling():
            yield
        else:
            with _FullPrecisionFunctions():
                yield


_RAISED_ON_CPU = frozenset({F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, torch.log_softmax})
_RAISED_METHODS = frozenset({torch.Tensor.softmax, torch.Tensor.log_softmax})


class _FullPrecisionFunctions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RAISED_ON_CPU or func in _RAISED_METHODS:
            args = tuple(_raised(value) for value in args)
            kwargs = {key: _raised(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _device_type(args: Any, kwargs: Any) -> str | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return None


def _raised(value: Any) -> Any:
    """A tensor of 16 bits in fp32; everything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW else value
