"""Contents of storages that can be computed again, operator by operator, without running Python code again.

A `Value` is what a storage holds at one moment of the forward pass. It is either *held* (a parameter, an
input, a result that is kept: somebody has the tensor) or *recomputable*: it knows the `Call` of the operator
that made it, and the call knows its operands, held or recomputable themselves. An operator that writes in
place makes a new value of the same storage. `compute` runs what is missing, each call once, in the order of
the forward pass, and keeps of what it makes only what the backward pass still asks for.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.core.errors import UsageError

RandomState = tuple[torch.device, Any]


class Geometry(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """A tensor's own."""
        return cls(tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def view(self, whole: Tensor) -> Tensor:
        """The tensor of this geometry in the storage of ``whole``."""
        if whole.dtype == self.dtype:
            return whole.as_strided(self.size, self.stride, self.offset)
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


class Held:
    """Holds a tensor for recomputation, and notices when it is changed in place."""

    __slots__ = ("__weakref__", "size_bytes", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.size_bytes = tensor.untyped_storage().nbytes()

    def unchanged(self) -> Tensor:
        """The tensor. UsageError where it was changed after the forward pass."""
        tensor = self.tensor
        if tensor._version != self.version or tensor.untyped_storage().nbytes() < self.size_bytes:
            raise UsageError(
                f"a {tensor.dtype} of shape {list(tensor.shape)} that the backward pass computes others from "
                "was changed in place, or its memory given back, after the forward pass: rematerialization "
                "does not go with that; use gradient_checkpointing for this model"
            )
        return tensor

    def copy(self) -> None:
        """Holds a copy from now on: the storage is about to be written."""
        self.tensor = _copied_whole(self.tensor, Geometry.of(self.tensor))
        self.version = self.tensor._version


class Value:
    """What one storage holds from one write to the next."""

    __slots__ = ("__weakref__", "call", "flat", "held", "pending")

    def __init__(self, call: Call | None = None) -> None:
        self.call = call
        self.held: weakref.ref[Held] | None = None
        self.flat: Tensor | None = None
        self.pending = 0

    @property
    def is_held(self) -> bool:
        """Whether it cannot be computed again, and need not be."""
        return self.call is None

    def hold(self, tensor: Tensor) -> Held:
        """The one holder of a held value; ``tensor`` shows its storage."""
        held = self.held() if self.held is not None else None
        if held is None:
            held = Held(sharing_version(tensor))
            self.held = weakref.ref(held)
        return held


class Operand(NamedTuple):
    """One tensor among a call's arguments."""

    value: Value
    held: Held | None
    geometry: Geometry


@dataclass(eq=False)
class Call:
    """One operator that ran: enough to run it again to the bit.

    ``target`` is the number of the operand that it writes in place, if it does. ``outputs`` are weak: a value
    that nobody needs is not made.
    """

    order: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    target: int | None = None
    random: RandomState | None = None
    outputs: list[weakref.ref[Value] | None] = field(default_factory=list)


class Slot:
    """Stands for the n-th operand in a call's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def compute(wanted: Value) -> Tensor:
    """The contents of ``wanted`` again, as a tensor that shows the whole of its storage's use."""
    if wanted.flat is not None:
        return wanted.flat
    calls, uses = _missing(wanted)
    there: dict[Value, Tensor] = {}
    for call in calls:
        _run(call, wanted, there, uses)
    return there.pop(wanted) if wanted.flat is None else wanted.flat


def _missing(wanted: Value) -> tuple[list[Call], Counter[Value]]:
    """The calls to run, in the order of the forward pass, and how often they read each value that they
    make."""
    calls: dict[int, Call] = {}
    waiting = [wanted]
    while waiting:
        call = waiting.pop().call
        assert call is not None, "a held value needs no call"
        if call.order in calls:
            continue
        calls[call.order] = call
        waiting += [o.value for o in call.operands if o.held is None and o.value.flat is None]
    uses = Counter(o.value for call in calls.values() for o in call.operands if o.held is None)
    return [calls[order] for order in sorted(calls)], uses


def _run(call: Call, wanted: Value, there: dict[Value, Tensor], uses: Counter[Value]) -> None:
    tensors = []
    for number, operand in enumerate(call.operands):
        value = operand.value
        if operand.held is not None:
            tensor = operand.geometry.view(operand.held.unchanged())
        else:
            tensor = operand.geometry.view(there[value] if value.flat is None else value.flat)
            uses[value] -= 1
        if number == call.target and (
            operand.held is not None or value.flat is not None or uses[value] or value is wanted
        ):
            tensor = _copied_whole(tensor, operand.geometry)
        tensors.append(tensor)
    for operand in call.operands:
        if operand.held is None and not uses[operand.value]:
            there.pop(operand.value, None)
    args, kwargs = put_back(call.args, tensors), put_back(call.kwargs, tensors)
    with _DrawingAsBefore(call.random):
        made = list(tensors_in(call.func(*args, **kwargs)))
    for reference, tensor in zip(call.outputs, made, strict=True):
        result = reference() if reference is not None else None
        if result is None or result.flat is not None:
            continue
        if result.pending:
            result.flat = tensor
        elif result is wanted or uses[result]:
            there[result] = tensor


def _copied_whole(tensor: Tensor, geometry: Geometry) -> Tensor:
    """A copy of the tensor's storage, seen as the tensor is: what is written in place must be nobody
    else's."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    copy = whole.clone()
    return torch.empty(0, dtype=geometry.dtype, device=tensor.device).set_(
        copy.untyped_storage(), geometry.offset, geometry.size, geometry.stride
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)


def put_back(value: Any, tensors: list[Tensor]) -> Any:
    """Arguments with tensors in their slots."""
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: put_back(inner, tensors) for key, inner in value.items()}
    return type(value)(put_back(inner, tensors) for inner in value) if type(value) in (tuple, list) else value


def sharing_version(tensor: Tensor) -> Tensor:
    """Another tensor on the same storage, with the same version counter: no graph, but it notices changes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _DrawingAsBefore:
    """Random numbers are drawn from the state that the operator found in the forward pass."""

    def __init__(self, state: RandomState | None) -> None:
        self._state = state
        self._now: RandomState | None = None

    def __enter__(self) -> None:
        if self._state is not None:
            self._now = random_state(self._state[0])
            set_random_state(*self._state)

    def __exit__(self, *error: object) -> None:
        if self._now is not None:
            set_random_state(*self._now)


def random_state(device: torch.device) -> RandomState | None:
    """The default generator of a device, as it is now; None where it has none. CUDA: seed and Philox offset,
    which are read without waiting for the device."""
    if device.type == "cuda":
        generators = torch.cuda.default_generators  # none for tensors that only say they are on a GPU
        index = torch.cuda.current_device() if device.index is None and generators else device.index
        if index is None or index >= len(generators):
            return None
        generator = generators[index]
        return torch.device("cuda", index), (generator.initial_seed(), generator.get_offset())
    return (device, torch.get_rng_state()) if device.type == "cpu" else None


def set_random_state(device: torch.device, state: Any) -> None:
    """Sets what `random_state` gave."""
    if device.type == "cuda":
        generator, (seed, offset) = torch.cuda.default_generators[device.index], state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        torch.set_rng_state(state)
