"""Keeps a recompute from changing a block's state a second time.

A forward may change more than it returns: running statistics, power-iteration vectors, moving averages,
counters. A recompute must start from the state that the forward started from, and must leave no trace. So
every call notes what the forward changed and what was there before; a recompute runs on copies of that, and
then everything is put back.

Changes are found by identity (an attribute or buffer was replaced) and by version counter (changed in
place). A buffer that is changed in place has to be copied before the forward; which ones are is learnt in a
block's first call, in which all its buffers are copied for the time of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit.core.errors import UsageError

_OF_TORCH = frozenset(nn.Module().__dict__) | {"forward"}
_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_NORMS = frozenset(
    {
        nn.BatchNorm1d.forward,
        nn.BatchNorm2d.forward,
        nn.BatchNorm3d.forward,
        nn.SyncBatchNorm.forward,
        nn.InstanceNorm1d.forward,
        nn.InstanceNorm2d.forward,
        nn.InstanceNorm3d.forward,
    }
)
"""Forwards whose output in training does not depend on the running statistics that they update. Their update
leaves no version behind, so they are known by name."""

Place = tuple[str, str]
"""A submodule's name in the block, and the name of a buffer or attribute of it."""


@dataclass(slots=True)
class BlockMemory:
    """What is known of a block between calls: which buffers its forward changes in place, by mode of its
    modules."""

    name: str
    changing: dict[tuple[bool, ...], set[Place]] = field(default_factory=dict)


class StateWatch:
    """One call of a block: made before its forward, ``finish`` after it, ``replay`` around each recompute."""

    def __init__(self, block: nn.Module, memory: BlockMemory) -> None:
        self._memory = memory
        self._modules = dict(block.named_modules())
        self._mode = tuple(module.training for module in self._modules.values())
        self._attributes = {name: _own_attributes(module) for name, module in self._modules.items()}
        self._buffers = {name: dict(m._buffers) for name, m in self._modules.items() if m._buffers}
        self._watched = list(self._watched_tensors())
        self._versions = [tensor._version for _, tensor in self._watched]
        self._copies = {place: tensor.detach().clone() for place, tensor in self._to_copy()}
        self._before: dict[Place, Any] = {}

    def finish(self) -> None:
        """Sorts out what the forward changed, and forgets the rest.

        Raises:
            UsageError: a buffer changed in place that never did so before: what it was is lost.
        """
        replaced = dict(self._replaced())
        pairs = zip(self._watched, self._versions, strict=True)
        changed = {place for (place, tensor), version in pairs if tensor._version != version}
        lost = sorted(changed - self._copies.keys())
        if lost:
            raise UsageError(
                f"block {self._memory.name!r} changes its buffer {'.'.join(filter(None, lost[0]))!r} in "
                "place in some calls only, so it cannot be recomputed; leave this block out of gradient "
                "checkpointing"
            )
        always = {place for place in self._copies if place[1] in _RUNNING}
        self._memory.changing[self._mode] = self._memory.changing.get(self._mode, set()) | changed
        self._before = replaced | {place: self._copies[place] for place in changed | always}
        del self._attributes, self._buffers, self._watched, self._versions, self._copies

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Runs its body on the state that the forward started from, and puts back what was there."""
        attributes = [(module, _own_attributes(module)) for module in self._modules.values()]
        buffers = [(module, dict(module._buffers)) for module in self._modules.values() if module._buffers]
        try:
            self._put_scratch_statistics()
            for (name, key), value in self._before.items():
                _put(self._modules[name], key, value)
            yield
        finally:
            for module, kept in buffers:
                module._buffers.update(kept)
            for module, kept in attributes:
                _restore_attributes(module, kept)

    def _put_scratch_statistics(self) -> None:
        for module in self._modules.values():
            if _is_plain_norm(module):
                for key in _RUNNING & module._buffers.keys():
                    statistic = module._buffers[key]
                    module._buffers[key] = None if statistic is None else statistic.detach().clone()

    def _watched_tensors(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """Buffers and plain tensor attributes as they were before the forward, but for those of plain
        norms."""
        for name, held in (*self._buffers.items(), *self._attributes.items()):
            passed_over = _RUNNING if _is_plain_norm(self._modules[name]) else frozenset()
            for key, value in held.items():
                if isinstance(value, torch.Tensor) and not value.is_inference() and key not in passed_over:
                    yield (name, key), value

    def _to_copy(self) -> Iterator[tuple[Place, torch.Tensor]]:
        learnt = self._memory.changing.get(self._mode)
        for place, tensor in self._watched:
            running = place[1] in _RUNNING and self._modules[place[0]].training
            if running or learnt is None or place in learnt:
                yield place, tensor

    def _replaced(self) -> Iterator[tuple[Place, Any]]:
        """Buffers and attributes that are another object now, with the object that was there."""
        for name, held in self._buffers.items():
            now = self._modules[name]._buffers
            yield from (((name, key), value) for key, value in held.items() if now.get(key) is not value)
        for name, held in self._attributes.items():
            now = self._modules[name].__dict__
            for key, value in held.items():
                if now.get(key) is not value:
                    yield (name, key), value


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _OF_TORCH}


def _restore_attributes(module: nn.Module, kept: dict[str, Any]) -> None:
    for key in [key for key in module.__dict__ if key not in _OF_TORCH and key not in kept]:
        del module.__dict__[key]
    module.__dict__.update(kept)


def _put(module: nn.Module, key: str, value: Any) -> None:
    value = value.detach().clone() if isinstance(value, torch.Tensor) and key in module._buffers else value
    (module._buffers if key in module._buffers else module.__dict__)[key] = value


def _is_plain_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and type(module).forward in _NORMS
