"""Rows of zeros below a weight, and everything that must not see them: logits, ``state_dict``, undo."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memfit.techniques.base import Undo
from memfit.techniques.replaced_forward import ReplacedForward, set_forwards


class CutForward(ReplacedForward):
    """An output layer that gives the logits of its true rows only."""

    def __init__(self, module: nn.Module, previous: Any = None, rows: int = 0) -> None:
        super().__init__(module, previous)
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._previous, self.rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = self.original()(*args, **kwargs)
        return logits[..., : self.rows]


class CutOnSave:
    """Hook of one module: ``state_dict`` gives the true rows."""

    def __init__(self, keys: tuple[str, ...], rows: int) -> None:
        self.keys, self.rows = keys, rows

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in self.keys:
            if prefix + key in state:
                state[prefix + key] = state[prefix + key][: self.rows]


class PadOnLoad:
    """Hook of one module: ``load_state_dict`` takes the true rows, and pads them with zeros."""

    def __init__(self, keys: tuple[str, ...], rows: int) -> None:
        self.keys, self.rows = keys, rows

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for key in self.keys:
            value = state.get(prefix + key)
            if isinstance(value, Tensor) and value.shape[0] == self.rows:
                state[prefix + key] = grown(value, getattr(module, key).shape[0])


def pad_rows(root: nn.Module, layer: Any, rows: int, optimizer: torch.optim.Optimizer | None) -> Undo:
    """Pads weight and bias of ``layer`` to ``rows``, wherever in ``root`` they are used."""
    true = int(layer.weight.shape[0])
    held = [weight for weight in (layer.weight, getattr(layer, "bias", None)) if weight is not None]
    for weight in held:
        _resize(weight, rows, optimizer)
    take_off = set_forwards([(layer, CutForward(layer, None, true))], "vocabulary_padding")
    handles = [handle for module, keys in _owners(root, held) for handle in _hook(module, keys, true)]
    references = [weakref.ref(weight) for weight in held]
    optimizer_reference = None if optimizer is None else weakref.ref(optimizer)

    def undo() -> None:
        take_off()
        for handle in handles:
            handle.remove()
        for reference in references:
            weight = reference()
            if weight is not None:
                _resize(weight, true, None if optimizer_reference is None else optimizer_reference())

    return undo


def grown(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros below, or cut to ``rows``."""
    if tensor.shape[0] >= rows:
        return tensor[:rows].clone()
    made = tensor.new_zeros((rows, *tensor.shape[1:]))
    made[: tensor.shape[0]] = tensor
    return made


def _resize(weight: Any, rows: int, optimizer: torch.optim.Optimizer | None) -> None:
    """In place, with gradient and state."""
    before = weight.shape
    gradient = weight.grad
    weight.grad = None
    weight.data = grown(weight.data, rows)
    weight.grad = None if gradient is None else grown(gradient, rows)
    state = {} if optimizer is None else optimizer.state.get(weight, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == before:
            state[key] = grown(value, rows)


def _owners(root: nn.Module, held: list[Any]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    wanted = {id(weight) for weight in held}
    for module in root.modules():
        keys = tuple(key for key, value in module._parameters.items() if id(value) in wanted)
        if keys:
            yield module, keys


def _hook(module: nn.Module, keys: tuple[str, ...], rows: int) -> list[Any]:
    return [
        module.register_state_dict_post_hook(CutOnSave(keys, rows)),
        module.register_load_state_dict_pre_hook(PadOnLoad(keys, rows)),
    ]
