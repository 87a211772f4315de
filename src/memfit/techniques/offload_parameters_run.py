"""How parameters come and go: what runs around a block's forward, and what the backward pass asks for."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo
from memfit.techniques.offload_parameters import check_device
from memfit.techniques.replaced_forward import ReplacedForward, set_forwards
from memfit.techniques.saved_tensors import AsItIs, is_recomputed

if TYPE_CHECKING:
    from memfit.techniques.offload_parameters import ParameterOffload


def offload(technique: ParameterOffload, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Undo:
    """Moves the parameters of ``blocks`` away; gives back what brings them back."""
    parameters = _movable(model, blocks)
    if not any(parameters.values()):
        raise UsageError(f"{technique.name}: the blocks have no parameters of their own")
    devices = {parameter.device for members in parameters.values() for parameter in members}
    device = check_device(technique, next(iter(devices)))
    homes = {id(p): p.device for members in parameters.values() for p in members}
    if technique.to == "disk":
        _map_into_file(technique, model, [p for members in parameters.values() for p in members])
    elif device.type == "cuda":
        for members in parameters.values():
            for parameter in members:
                parameter.data = parameter.data.cpu().pin_memory()
    removals: list[Any] = []
    train = Train(device)
    visited = blocks if device.type == "cuda" else []
    forwards = [(block, VisitingForward(block, train.add(parameters[name]))) for name, block in visited]
    take_off = set_forwards(forwards, technique.name)
    if device.type == "cuda":
        for name, _ in blocks:
            for parameter in parameters[name]:
                if parameter.requires_grad:
                    removals += HostGradient(parameter).handles
    references = [weakref.ref(block) for _, block in blocks]

    def undo() -> None:
        take_off()
        for removal in removals:
            removal.remove()
        train.only()
        for block in filter(None, (reference() for reference in references)):
            for parameter in block.parameters():
                if id(parameter) in homes:
                    parameter.data = parameter.data.to(homes[id(parameter)], copy=True)
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.to(parameter.device)

    return undo


def _movable(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each block that no other module has too (tied weights stay where they are)."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    found: dict[str, list[nn.Parameter]] = {}
    taken: set[int] = set()
    for name, block in blocks:
        inside = {id(module) for module in block.modules()}
        members = [p for p in block.parameters() if users[id(p)] <= inside and id(p) not in taken]
        taken |= {id(p) for p in members}
        found[name] = members
    return found


def _map_into_file(technique: ParameterOffload, model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Puts the values into a memory-mapped file, under the names that they have in the model."""
    from memfit.techniques.offload_files import MappedFiles

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    files = MappedFiles(technique.folder, technique.name)
    mapped = files.add([(names[id(parameter)], parameter.data.cpu()) for parameter in parameters])
    for parameter, place in zip(parameters, mapped, strict=True):
        parameter.data = place


class HostGradient:
    """Takes one parameter's gradients to the host, where they add up.

    The backward pass adds a new gradient to what is in ``.grad``, on the device; so the sum on the host is
    set aside for that moment.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._sum: Tensor | None = None
        after = parameter.register_post_accumulate_grad_hook(self._take)
        self.handles = [parameter.register_hook(self._set_aside), after]

    def _set_aside(self, gradient: Tensor) -> None:
        parameter = self._parameter()
        if parameter is not None and parameter.grad is not None:
            self._sum, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.to("cpu"), None
        parameter.grad = gradient if self._sum is None else self._sum.add_(gradient)
        self._sum = None


class Train:
    """The blocks that take turns on one device, and the stream on which they are brought."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cars: list[Car] = []
        self._stream: Any = None

    @property
    def stream(self) -> Any:
        """Made when first needed: a model may be built before CUDA is."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def add(self, parameters: list[nn.Parameter]) -> Car:
        """A block more."""
        self.cars.append(Car(self, len(self.cars), parameters))
        return self.cars[-1]

    def only(self, *numbers: int) -> None:
        """Lets the copies of all other blocks go."""
        for car in self.cars:
            if car.number not in numbers:
                car.leave()

    def bring(self, number: int) -> None:
        """Starts the copies of a block, if there is such a block."""
        if 0 <= number < len(self.cars):
            self.cars[number].come()


class Car:
    """One block's parameters: on the host always, on the device from ``come`` to ``leave``."""

    def __init__(self, train: Train, number: int, parameters: list[nn.Parameter]) -> None:
        self.train, self.number, self.parameters = train, number, parameters
        self._there: list[Tensor] | None = None
        self._ready: Any = None

    def come(self) -> None:
        """Starts to copy to the device on the side stream."""
        if self._there is not None:
            return
        compute, stream = torch.cuda.current_stream(self.train.device), self.train.stream
        with torch.no_grad():
            self._there = [torch.empty_like(p.data, device=self.train.device) for p in self.parameters]
            stream.wait_event(compute.record_event())
            with torch.cuda.stream(stream):
                for copy, parameter in zip(self._there, self.parameters, strict=True):
                    copy.copy_(parameter.data, non_blocking=True)
            self._ready = stream.record_event()

    def tensors(self) -> list[Tensor]:
        """The copies; what the device computes from now on waits for them."""
        self.come()
        assert self._there is not None
        torch.cuda.current_stream(self.train.device).wait_event(self._ready)
        return self._there

    def for_backward(self) -> list[Tensor]:
        """The copies, and the start of those of the block before; all leave when the backward pass ends."""
        self.train.only(self.number, self.number - 1)
        there = self.tensors()
        self.train.bring(self.number - 1)
        torch.autograd.Variable._execution_engine.queue_callback(self.train.only)
        return there

    def leave(self) -> None:
        """Gives up the copies, once they are made."""
        if self._there is not None:
            torch.cuda.current_stream(self.train.device).wait_event(self._ready)
            self._there = None


class VisitingForward(ReplacedForward):
    """The forward of a block whose parameters are on the device while it runs."""

    def __init__(self, block: nn.Module, car: Car) -> None:
        super().__init__(block)
        self._car = car

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("parameter_offload: undo before copying a model whose parameters are elsewhere")

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        car, original = self._car, self.original()
        if torch._C._current_graph_task_id() != -1:  # run again by checkpointing
            there = car.for_backward()
        else:
            car.train.only(car.number, car.number + 1)
            there = car.tensors()
            car.train.bring(car.number + 1)
        hosts = [parameter.data for parameter in car.parameters]
        for parameter, copy in zip(car.parameters, there, strict=True):
            parameter.data = copy
        try:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            hooks = _Recomputed() if is_recomputed() else _Hooks(car, there)
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                return original(*args, **kwargs)
        finally:
            for parameter, host in zip(car.parameters, hosts, strict=True):
                parameter.data = host
            del there


class _OfParameter:
    """Stands for a saved parameter, or a view of one."""

    def __init__(self, car: Car, number: int, tensor: Tensor) -> None:
        self.car, self.number = car, number
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())


class _Recomputed:
    """Of a forward within a checkpointed region, around which PyTorch's hooks are.

    They keep the very object of what needs no gradient; a frozen parameter is on the host again when the
    backward pass reads it, so they get a tensor of its own that is where the parameter is now.
    """

    def __init__(self) -> None:
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert around is not None, "within a checkpointed region"
        self._pack, self.unpack = around

    def pack(self, tensor: Tensor) -> Any:
        return self._pack(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)


class _Hooks:
    """Of one forward of a block: parameters are brought again; all else goes to the hooks around, if any."""

    def __init__(self, car: Car, there: list[Tensor]) -> None:
        self._car = car
        self._places = {copy.untyped_storage()._cdata: number for number, copy in enumerate(there)}
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._around = around if around is not None else (AsItIs, AsItIs.tensor)

    def pack(self, tensor: Tensor) -> Any:
        plain = type(tensor) in (Tensor, nn.Parameter)  # norms save the parameter, linear layers a view of it
        number = self._places.get(tensor.untyped_storage()._cdata) if plain else None
        return self._around[0](tensor) if number is None else _OfParameter(self._car, number, tensor)

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _OfParameter):
            tensor: Tensor = self._around[1](saved)
            return tensor
        copy = saved.car.for_backward()[saved.number]
        with torch.no_grad():
            return copy.as_strided(*saved.geometry)
