"""The optimizer's state in host memory or on disk, and its step on the host: gradients go there, weights come
back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.techniques.base import Technique, Undo, refuse_second

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.offload import Where
    from memfit.techniques.optimizer_state_on_disk import StateOnDisk
    from memfit.techniques.optimizer_step import Closure, Inner
    from memfit.techniques.saving import Saving


@dataclass(frozen=True, kw_only=True)
class OffloadedOptimizerState(Technique):
    """Keeps an optimizer's state in host memory or on disk, and runs the optimizer's own step on the host.

    A step moves each gradient to the host and each weight back, 8 bytes for each fp32 parameter, all queued
    before the first is waited for; pinned copies of what is on a device are kept there. Checkpoints keep
    their form. For a model on the CPU only ``to="disk"`` changes anything: of the memory-mapped file the
    system keeps in memory what it has room for.

    Args:
        to: ``"host"``, or ``"disk"`` (a memory-mapped file in safetensors form, without a name: gone with the
            process).
        folder: of that file; the system's folder for temporary files by default.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = OffloadedOptimizerState().apply(model, optimizer)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].device.type
        'cpu'
    """

    name: ClassVar[str] = "offloaded_optimizer_state"

    to: Where = "host"
    folder: str | None = None

    def __post_init__(self) -> None:
        from memfit.techniques.offload import check_where

        check_where(self.to, self.folder, technique=self.name)

    def exactness(self, model: nn.Module) -> Exactness:
        """``exact`` for a model on the CPU; a GPU's kernels may round otherwise than the host's."""
        on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
        return "exact" if on_host else "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        from memfit.techniques.saving import saving_of

        state = sum(s.size_bytes for s in graph.storages if s.category == "optimizer_state")
        names = {s.name for s in graph.storages if s.category == "optimizer_state"}
        moved = 2 * sum(s.size_bytes for s in graph.storages if s.category == "parameter" and s.name in names)
        kept = (s for s in graph.storages if not _on_host(s, graph))
        note = (
            f"{format_bytes(state)} go to the {self.to}; each step moves {format_bytes(moved)} over the bus"
        )
        return saving_of(graph, kept, note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.optimizer_step import refuse_whole_step_optimizers, replace_step

        refuse_second(model, OffloadedOptimizerState)
        refuse_combination(model, self)
        if optimizer is None:
            raise UsageError(f"{self.name} changes the optimizer: apply(model, optimizer)")
        refuse_whole_step_optimizers(optimizer, self.name)
        host = _Host(optimizer, self._disk(model))
        step_back = replace_step(optimizer, host.step)
        reload = optimizer.register_load_state_dict_post_hook(host.fetch_state)
        reference = weakref.ref(optimizer)

        def undo() -> None:
            step_back()
            reload.remove()
            changed = reference()
            if changed is not None:
                host.give_back(changed)

        return undo

    def _disk(self, model: nn.Module) -> StateOnDisk | None:
        from memfit.techniques.offload_files import MappedFiles
        from memfit.techniques.optimizer_state_on_disk import StateOnDisk

        if self.to == "host":
            return None
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return StateOnDisk(MappedFiles(self.folder, self.name), names)


def _on_host(storage: Any, graph: StepGraph) -> bool:
    """State, and what the step makes for itself."""
    if storage.category == "optimizer_state":
        return True
    made_by_step = storage.born >= 0 and graph.ops[storage.born].phase == "optimizer"
    return bool(made_by_step and storage.category == "temporary")


def is_elsewhere(parameter: Tensor) -> bool:
    """Whether the host needs a copy to step it."""
    return parameter.device.type != "cpu"


class _Host:
    """The host's copies of what one optimizer steps on a device."""

    def __init__(self, optimizer: Optimizer, disk: StateOnDisk | None) -> None:
        self._disk = disk
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: dict[int, int] = {}
        self._devices: dict[tuple[int, str], Any] = {}
        self.fetch_state(optimizer)

    def fetch_state(self, optimizer: Optimizer) -> None:
        """Moves the state to the host, or on to the disk."""
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if hasattr(value, "device") and value.device.type != "cpu":
                    self._devices[id(parameter), key] = value.device
                    state[key] = value.to("cpu")
            if self._disk is not None:
                self._disk.take(parameter, state)
        if self._disk is not None:
            self._disk.flush()

    def give_back(self, optimizer: Optimizer) -> None:
        """Moves the state to where its parameter is (counters stay where PyTorch makes them)."""
        for parameter, state in optimizer.state.items():
            if self._disk is not None:
                self._disk.give_back(parameter, state)
            for key, value in state.items():
                device = self._devices.get((id(parameter), key))
                if device is None and hasattr(value, "dim") and value.dim() > 0:
                    device = parameter.device
                if device is not None:
                    state[key] = value.to(device)

    def step(self, optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
        """Gradients to the host, the optimizer's own step there, weights back."""
        import torch

        from memfit.techniques.optimizer_step import evaluated, step_each, step_one

        loss = evaluated(closure)
        with torch.no_grad():
            self._queue(optimizer)

            def on_host(group: dict[str, Any], parameter: Tensor) -> None:
                state = optimizer.state[parameter]
                if is_elsewhere(parameter):
                    copy, gradient = self._copies[id(parameter)]
                    copy.grad = gradient
                    optimizer.state[parameter] = state = step_one(optimizer, group, copy, state)
                    copy.grad = None
                    parameter.copy_(copy.detach(), non_blocking=True)
                    self._versions[id(parameter)] = parameter._version
                else:
                    optimizer.state[parameter] = state = step_one(optimizer, group, parameter, state)
                if self._disk is not None:
                    self._disk.take(parameter, state)

            step_each(optimizer, on_host)
            if self._disk is not None:
                self._disk.flush()
        return loss

    def _queue(self, optimizer: Optimizer) -> None:
        """Starts all copies to the host, and waits once."""
        import torch

        from memfit.techniques.optimizer_step import parameters_of

        devices = set()
        for _, parameter in parameters_of(optimizer):
            if parameter.grad is None or not is_elsewhere(parameter):
                continue
            if parameter.grad.is_sparse:  # small, and of another size each time
                self._copies[id(parameter)] = (self._pair(parameter)[0], parameter.grad.to("cpu"))
            copy, gradient = self._pair(parameter)
            if self._versions.get(id(parameter)) != parameter._version:  # set by somebody else
                copy.data.copy_(parameter, non_blocking=True)
            if not parameter.grad.is_sparse:
                gradient.copy_(parameter.grad, non_blocking=True)
            devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _pair(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        if id(parameter) not in self._copies:
            pinned = parameter.device.type == "cuda"
            weight = torch.empty_like(parameter, device="cpu", pin_memory=pinned)
            gradient = torch.empty_like(parameter, device="cpu", pin_memory=pinned)
            self._copies[id(parameter)] = (torch.nn.Parameter(weight), gradient)
        return self._copies[id(parameter)]
