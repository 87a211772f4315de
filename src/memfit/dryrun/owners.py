"""Whose memory it is: addresses of parameters, gradients, optimizer state, buffers and inputs, noted when
they are seen.

An address alone says little, for the allocator uses it again; so each note has its position in the
allocator's history, and `history` later finds the block that was at the address then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memfit.dryrun.history import Mark, Position
from memfit.dryrun.shadow import address_of


class Owners:
    """Notes of who owns which address, and when it was seen.

    Args:
        position: where the allocator's history of a device is now.
    """

    def __init__(self, position: Callable[[int], Position]) -> None:
        self.marks: list[Mark] = []
        self._position = position

    def note(self, category: str, tensors: Iterable[Any]) -> None:
        """The storages of ``tensors`` belong to ``category`` now."""
        positions: dict[int, Position] = {}
        for device, address in _addresses(tensors):
            position = positions.get(device)
            if position is None:
                position = positions[device] = self._position(device)
            self.marks.append(Mark(position=position, address=address, category=category, device=device))

    def note_model(self, model: torch.nn.Module) -> None:
        """Parameters, their gradients and buffers of a model."""
        parameters = list(model.parameters())
        self.note("parameter", parameters)
        self.note("gradient", [parameter.grad for parameter in parameters])
        self.note("buffer", model.buffers())

    def note_living(self) -> None:
        """Every leaf tensor that asks for a gradient, and its gradient: also models that nobody called."""
        leaves = [thing for thing in gc.get_objects() if _is_leaf(thing)]
        self.note("parameter", leaves)
        self.note("gradient", [leaf.grad for leaf in leaves])

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters, gradients and state of an optimizer."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.note("parameter", parameters)
        self.note("gradient", [parameter.grad for parameter in parameters])
        self.note("optimizer_state", _inside(list(optimizer.state.values())))


def _is_leaf(thing: Any) -> bool:
    # By type: asking an object for its class may wake a lazily loaded module.
    if not issubclass(type(thing), torch.Tensor):
        return False
    try:
        return bool(thing.requires_grad and thing.is_leaf)
    except RuntimeError:  # a view that autograd refuses to look at, as FSDP's first version leaves some
        return False


def _addresses(tensors: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.is_cuda:
            try:
                address = address_of(local)
            except RuntimeError:  # one of vmap's, which wraps another tensor and has no memory
                continue
            if address:
                yield local.device.index, address


def _inside(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _inside(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _inside(part)
