"""What a training step changes, so that a step that failed half-way can be run again as if it never had been:
random states, buffers, gradients, and (once the optimizer steps) weights and optimizer state."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.techniques.base import Undo
from memfit.techniques.mixed_precision import mixed_precision_of
from memfit.techniques.optimizer_step import Closure, Inner, parameters_of, replace_step

_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Buffers that norms change without a trace in their version."""


class StepState:
    """Notes what is there before a step, and puts it back.

    Buffers that a step changes are found in the first one, where all are copied; later only those are.
    Weights and optimizer state are copied to host memory when the optimizer's step begins: always on the CPU;
    on a GPU when its free memory may not do for that step (``tight``).

    Args:
        model: whose buffers and gradients count.
        optimizers: whose steps are watched.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._changing: set[str] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._backups: list[TrainingState] = []
        self._random: _RandomState | None = None
        self._scale_back: Undo | None = None
        self.stepped_without_backup = False

    def watch(self) -> Undo:
        """Watches the optimizers' steps; gives back what ends that."""
        undos = [replace_step(optimizer, self._step) for optimizer in self._optimizers]

        def undo() -> None:
            for take_back in undos:
                take_back()

        return undo

    def begin(self) -> None:
        """Notes what is there now."""
        self._random = _RandomState(self._model)
        named = dict(self._model.named_buffers())
        wanted = named.keys() if self._changing is None else self._changing & named.keys()
        self._buffers = {name: named[name].detach().clone() for name in wanted}
        self._gradients = [
            (p, None if p.grad is None else p.grad.detach().to("cpu", copy=True))
            for p in self._model.parameters()
        ]
        mp = mixed_precision_of(self._model)
        self._scale_back = None if mp is None else mp.remembered()
        self._backups, self.stepped_without_backup = [], False

    def end(self) -> None:
        """The step went well: learns what it changed, and forgets the rest."""
        if self._changing is None:
            now = dict(self._model.named_buffers())
            running = {name for name in now if name.rpartition(".")[2] in _RUNNING}
            self._changing = running | {
                name
                for name, before in self._buffers.items()
                if name in now and not torch.equal(before, now[name])
            }
        self.forget()

    def forget(self) -> None:
        """The step is over, one way or another: what was noted is let go."""
        self._buffers, self._gradients, self._backups, self._random = {}, [], [], None
        self._scale_back = None

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back as it was when the step began."""
        assert self._random is not None, "restore without begin"
        self._random.restore()
        named = dict(self._model.named_buffers())
        for name, value in self._buffers.items():
            named[name].copy_(value)
        for backup in reversed(self._backups):
            backup.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        if self._scale_back is not None:
            self._scale_back()
        self._backups = []

    def _step(self, optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
        if self._random is None:  # a step outside of the guard
            return inner(closure)
        if _tight(optimizer):
            self._backups.append(TrainingState(optimizer))
        else:
            self.stepped_without_backup = True
        return inner(closure)


def _tight(optimizer: Optimizer) -> bool:
    """Whether the device may run out of memory in this step: less is free than its temporaries may take (1.5
    times the weights), and two moments where they are still to be made. Always so on the host, where nobody
    can say."""
    sizes: dict[torch.device, int] = {}
    for _, parameter in parameters_of(optimizer):
        sizes[parameter.device] = sizes.get(parameter.device, 0) + parameter.nbytes
    for device, size in sizes.items():
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free + cached < (1.5 if optimizer.state else 3.5) * size:
            return True
    return False


class TrainingState:
    """Weights and state of one optimizer (and the rest of a model's weights), in host memory."""

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        self._optimizer = optimizer
        weights = {id(p): p for _, p in parameters_of(optimizer)}
        weights |= {id(p): p for p in (model.parameters() if model is not None else ())}
        self._weights = [(p, p.detach().to("cpu", copy=True)) for p in weights.values()]
        self._states = {p: {k: _copied(v) for k, v in s.items()} for p, s in optimizer.state.items()}

    def restore(self) -> None:
        """Puts weights and state back, in place."""
        for parameter, value in self._weights:
            parameter.copy_(value)
        state = self._optimizer.state
        for parameter in [p for p in state if p not in self._states]:
            del state[parameter]
        for parameter, values in self._states.items():
            for key, value in values.items():
                held = state[parameter].get(key)
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    held.copy_(value)
                else:
                    state[parameter][key] = value


class _RandomState:
    """Python's, numpy's (if it is loaded) and PyTorch's generators, of the model's devices too."""

    def __init__(self, model: nn.Module) -> None:
        self._python, self._host = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
