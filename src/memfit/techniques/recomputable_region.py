"""The forward pass of a model whose blocks drop what they save: what autograd asks for is computed again.

A dispatch mode notes each operator of the forward pass, hooks on saved tensors keep a recipe in place of a
dropped tensor, and the backward pass computes what it asks for from what is held (see `recomputable_values`).
No Python code of the model runs twice: not its branches, hooks, caches or statistics.

What cannot be computed again to the bit is held, whatever is asked for: results of operators outside of
PyTorch's own, of custom autograd functions (their kernels may write where no operator is seen), of
collectives, of tensor subclasses, memory that is made empty or constant, and what writes to several tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from memfit.techniques.operation_names import OperationNames
from memfit.techniques.recomputable_values import (
    Call,
    Geometry,
    Operand,
    Slot,
    Value,
    compute,
    random_state,
    tensors_in,
)
from memfit.techniques.replaced_forward import ReplacedForward
from memfit.techniques.saved_tensors import AsItIs, is_recomputed
from memfit.techniques.selective import LightMode

_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: (3, 4, 5),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4, 5),
    torch.ops.aten.miopen_batch_norm.default: (3, 4, 5),
}
"""Batch norms: where their running statistics are, which they change unseen, and whether they are trained."""


class Region(LightMode):
    """One forward pass: the operators that ran, and the value of each storage that is alive."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.block: tuple[str, frozenset[str] | None] = ("", None)
        self._device_type = device_type
        self._names = OperationNames()
        self._values: dict[int, Value] = {}
        self._watched: dict[int, Any] = {}
        self._order = 0
        self._lock = threading.RLock()

    @contextmanager
    def within(self, name: str, keeps: frozenset[str] | None) -> Iterator[None]:
        """The operators that run now are those of block ``name``, which keeps these (None: all)."""
        before, self.block = self.block, (name, keeps)
        try:
            yield
        finally:
            self.block = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        role = _ROLES.get(func) or _role(func)
        tensors = list(tensors_in((args, tuple(kwargs.values()))))
        if role.is_view or role.is_silent:
            return func(*args, **kwargs)
        if role.writes:
            self._copy_before_change(role, args, kwargs)
        keep = self._is_kept(role, tensors) or not role.recomputable or kwargs.get("generator") is not None
        if keep or not all(map(_is_plain, tensors)):
            out = func(*args, **kwargs)
            self._note_held(role, tensors, out)
            return out
        call = self._call(role, func, args, kwargs)
        out = func(*args, **kwargs)
        self._note(call, role, tensors, out)
        return out

    def _copy_before_change(self, role: _Role, args: Any, kwargs: Any) -> None:
        """What is about to be written in place, and held because others are computed from it, is copied."""
        written = [args[at] if at < len(args) else None for at in role.written_at]
        for tensor in tensors_in((*written, *(kwargs.get(name) for name in role.written_names))):
            value = self._values.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None
            held = value.held() if value is not None and value.held is not None else None
            if held is not None:
                held.copy()

    def _is_kept(self, role: _Role, tensors: list[Tensor]) -> bool:
        """Whether the block keeps what the operator makes. Operators on other devices have no number."""
        block, keeps = self.block
        if tensors and all(tensor.device.type != self._device_type for tensor in tensors):
            return True
        name = self._names.next(block, role.base)
        return keeps is None or name in keeps or name.partition(":")[0] in keeps

    def _call(self, role: _Role, func: Any, args: Any, kwargs: Any) -> Call:
        """The operator about to run, with its operands as they are now."""
        operands: list[Operand] = []
        at = _STATISTICS.get(func)
        if at is not None and len(args) > at[2] and args[at[2]]:
            args = tuple(None if number in at[:2] else value for number, value in enumerate(args))
        self._order += 1
        given = self._taken_out(tuple(args), operands)
        named = {key: self._taken_out(value, operands) for key, value in kwargs.items()}
        draws = role.draws and not (
            role.dropout_at is not None and not _argument(args, kwargs, role.dropout_at)
        )
        device = next((tensor.device for tensor in tensors_in((args,))), None)
        return Call(
            order=self._order,
            func=func,
            args=given,
            kwargs=named,
            operands=tuple(operands),
            target=0 if role.written else None,
            random=random_state(device) if draws and device is not None else None,
        )

    def _taken_out(self, value: Any, operands: list[Operand]) -> Any:
        """The value with slots in place of tensors, now operands. No closure: it would be a cycle."""
        if isinstance(value, Tensor):
            operands.append(self._operand(value))
            return Slot(len(operands) - 1)
        if type(value) in (tuple, list):
            return type(value)(self._taken_out(inner, operands) for inner in value)
        return value

    def _operand(self, tensor: Tensor) -> Operand:
        value = self._values_of(tensor)
        return Operand(value, value.hold(tensor) if value.is_held else None, Geometry.of(tensor))

    def _values_of(self, tensor: Tensor, *, held: bool = False) -> Value:
        """The value of a tensor's storage now; one that was not seen before is held, as is every one that is
        asked for so."""
        key = tensor.untyped_storage()._cdata
        value = self._values.get(key)
        if value is None or (held and not value.is_held):
            value = self._new(tensor, Value())
        return value

    def _new(self, tensor: Tensor, value: Value) -> Value:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._values[key] = value
        if key not in self._watched:
            values, watched = self._values, self._watched

            def forget(_: Any) -> None:
                values.pop(key, None)
                watched.pop(key, None)

            self._watched[key] = weakref.ref(storage, forget)
        return value

    def _note(self, call: Call, role: _Role, tensors: list[Tensor], out: Any) -> None:
        """The results are values that the call makes; a storage that it wrote in place has a new one."""
        before = {tensor.untyped_storage()._cdata for tensor in tensors}
        made: list[weakref.ref[Value] | None] = []
        for tensor in tensors_in(out):
            fresh = tensor.untyped_storage()._cdata not in before
            if not _is_plain(tensor) or not (fresh or role.written):
                made.append(None)
                continue
            if not fresh and call.operands[0].value.is_held:  # a parameter, a statistic, what somebody keeps
                self._new(tensor, Value())
                made.append(None)
                continue
            value = Value(call)
            self._new(tensor, value)
            made.append(weakref.ref(value))
        call.outputs = made

    def _note_held(self, role: _Role, tensors: list[Tensor], out: Any) -> None:
        """What is kept: each new result and each tensor written is held from now on."""
        before = {tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)}
        for tensor in (*tensors_in(out), *(tensors if role.writes else ())):
            if _is_plain(tensor) and (role.writes or tensor.untyped_storage()._cdata not in before):
                self._new(tensor, Value())

    def forget(self) -> None:
        """The forward pass is over: what nobody asks for again goes."""
        self._values.clear()
        self._watched.clear()

    def hold(self, value: Any) -> None:
        """Holds the tensors among arguments or results from now on: where they are written is not seen."""
        for tensor in tensors_in(value):
            if _is_plain(tensor):
                self._values_of(tensor, held=True)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""
        if not _is_plain(tensor):
            return AsItIs(tensor)
        value = self._values.get(tensor.untyped_storage()._cdata)
        if value is None or value.is_held:
            return AsItIs(tensor)
        value.pending += 1
        return _Dropped(value, Geometry.of(tensor), self._lock)

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """The tensor, computed again where it was dropped."""
        tensor: Tensor = saved.tensor()
        return tensor


class _Dropped:
    """Stands for a tensor that autograd saved and that was dropped."""

    def __init__(self, value: Value, geometry: Geometry, lock: Any) -> None:
        self._value, self._geometry, self._lock = value, geometry, lock
        self._asked = False

    def tensor(self) -> Tensor:
        """It, computed again; the backward pass of a graph that is kept may ask again."""
        value = self._value
        # Recomputation is told from the backward pass by gradients being enabled; nothing here needs any.
        with self._lock, torch.enable_grad(), torch._C._DisableAutocast():
            whole = compute(value)
            tensor = self._geometry.view(whole)
        if not self._asked:
            self._asked = True
            value.pending -= 1
        if value.pending == 0:
            value.flat = None
        return tensor


@dataclass(frozen=True)
class _Role:
    """What is to be known of an operator, the same for every call."""

    base: str
    is_view: bool
    is_silent: bool
    recomputable: bool
    writes: bool
    written: bool
    written_at: tuple[int, ...]
    written_names: tuple[str, ...]
    draws: bool
    dropout_at: int | None


_ROLES: dict[Any, _Role] = {}
_MAKES_MEMORY = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full")


def _role(func: Any) -> _Role:
    schema = func._schema
    base = schema.name.partition("::")[2]
    writes = [
        (number, argument)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    in_place = len(writes) == 1 and writes[0][0] == 0 and str(writes[0][1].type) == "Tensor"
    has_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    memory = base.startswith(_MAKES_MEMORY) or not has_tensors
    role = _Role(
        base=base,
        is_view=bool(func.is_view) or func is torch.ops.aten.detach.default,
        is_silent=func.namespace == "prim",
        recomputable=func.namespace == "aten" and not memory and (not writes or in_place) and base != "set_",
        writes=bool(writes),
        written=in_place,
        written_at=tuple(number for number, argument in writes if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in writes if argument.kwarg_only),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        dropout_at=next((n for n, a in enumerate(schema.arguments) if a.name == "dropout_p"), None),
    )
    _ROLES[func] = role
    return role


def _argument(args: Any, kwargs: Any, at: int) -> Any:
    return args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)


def _is_plain(tensor: Tensor) -> bool:
    """An ordinary tensor, whose storage says all of it."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_transformed() -> bool:
    """Whether ``torch.func`` transforms what runs, which allows no hooks on saved tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_ACTIVE = threading.local()
_APPLY: Any = vars(torch.autograd.Function)["apply"]


class _CustomFunctions:
    """While a region is open, what custom autograd functions are given and give back is held: their kernels
    read and write memory where no operator is seen."""

    _lock = threading.Lock()
    _open = 0

    def __enter__(self) -> None:
        cls = _CustomFunctions
        with cls._lock:
            cls._open += 1
            if cls._open == 1:
                torch.autograd.Function.apply = classmethod(_applied)

    def __exit__(self, *error: object) -> None:
        cls = _CustomFunctions
        with cls._lock:
            cls._open -= 1
            if cls._open == 0:
                torch.autograd.Function.apply = _APPLY


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    region = getattr(_ACTIVE, "region", None)
    if region is None:
        return _APPLY.__get__(None, function)(*args, **kwargs)
    region.hold((args, tuple(kwargs.values())))
    with region.within("", None):
        out = _APPLY.__get__(None, function)(*args, **kwargs)
    region.hold(out)
    return out


class RecomputableForward(ReplacedForward):
    """The forward of a block (or of the whole model) that drops what it does not keep.

    Args:
        module: whose ``forward`` this replaces.
        name: of the block; ``""`` for the model.
        keeps: names of the operators whose results it keeps; None: of all.
        previous: a ``forward`` that was set on the instance before, if any.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        keeps: tuple[str, ...] | None,
        previous: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(module, previous)
        self.name = name
        self.keeps = keeps
        self._kept = None if keeps is None else frozenset(keeps)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecomputableForward, (self._module(), self.name, self.keeps, self._previous)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _is_transformed():
            return original(*args, **kwargs)
        return self._recorded(original, args, kwargs)

    @_disable_dynamo
    def _recorded(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = getattr(_ACTIVE, "region", None)
        if region is not None:
            with region.within(self.name, self._kept):
                return original(*args, **kwargs)
        if is_recomputed():
            return original(*args, **kwargs)
        module = self._module()
        assert module is not None, "a forward outlived its module"
        region = Region(next((p.device.type for p in module.parameters()), "cpu"))
        _ACTIVE.region = region
        try:
            with (
                _CustomFunctions(),
                region,
                torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack),
                region.within(self.name, self._kept),
            ):
                return original(*args, **kwargs)
        finally:
            _ACTIVE.region = None
            region.forget()
