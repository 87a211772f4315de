"""Seeing every operation just before its kernel, without PyTorch noticing.

A dispatch mode would see the same operations, but PyTorch behaves differently while one is active: derivative
formulas and composite operations then avoid working in place (``isTensorSubclassLike`` is true for every
tensor), so that ``gather``'s backward, for one, holds an extra tensor as large as its input. So this does not
use a mode. It puts a Python function under the dispatch key ``Fake``, which no part of PyTorch uses and which
lies below autograd, tensor subclasses and modes, and switches the key on for this thread (and those that
autograd starts for it).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from memfit.dryrun.native_writers import after_import

_KEY = torch._C._dispatch_key_parse("Fake")
_KEYS = torch._C.DispatchKeySet(_KEY)
_set_key = torch._C._dispatch_tls_set_dispatch_key_included
_key_is_on = torch._C._dispatch_tls_is_dispatch_key_included
_ABOVE_MODES = (_KEYS | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)).highestPriorityTypeId() == _KEY
"""Up to PyTorch 2.11 the key comes before modes, where it cannot be used while one is active."""

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""``handler(func, args, kwargs)``: is to call ``func`` once, and to give its result."""


class _Before(threading.local):
    """Whether the key was on before each mode that it stands back from, in this thread."""

    def __init__(self) -> None:
        self.states: list[bool] = []


class _State:
    """What this process has installed, once, and who is told now."""

    handler: Handler | None = None
    libraries: tuple[Any, ...] = ()  # registrations last as long as these objects


def intercept(handler: Handler) -> None:
    """From now on call ``handler`` in place of every operation of this thread and of its backward passes.

    Operations that only make views are not seen: they neither allocate nor read. Forks of the process are
        left alone.
    """
    if not _State.libraries:
        _install()
    _State.handler = handler
    _set_key(_KEY, True)


def current_handler() -> Handler | None:
    """Who is told now; to be called by a handler that is put in its place for a while."""
    return _State.handler


def resume() -> None:
    """In a fork of a process that intercepts: go on as there. Forks do not by themselves."""
    if _State.handler is not None:
        _set_key(_KEY, True)


@contextlib.contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """`intercept` for a while."""
    before, was_on = _State.handler, _key_is_on(_KEY)
    intercept(handler)
    try:
        yield
    finally:
        _State.handler = before
        _set_key(_KEY, was_on)


def _install() -> None:
    keys, exclude, state = _KEYS, torch._C._ExcludeDispatchKeyGuard, _State

    def called(func: Any, *args: Any, **kwargs: Any) -> Any:
        with exclude(keys):
            return state.handler(func, args, kwargs)  # type: ignore[misc]

    everything = torch.library.Library("_", "IMPL")
    everything.fallback(called, "Fake")
    state.libraries = (everything, _let_views_through())
    if _ABOVE_MODES:
        state.libraries += (_let_subclasses_through(called),)
    _let_higher_order_operators_through()
    _stand_back_from_modes()
    os.register_at_fork(after_in_child=lambda: _set_key(_KEY, False))


def _stand_back_from_modes() -> None:
    """While fake tensors are traced (torch.compile) nothing runs on the device: the key is off."""
    classes = {
        "torch._subclasses.fake_tensor": "FakeTensorMode",
        "torch._subclasses.functional_tensor": "FunctionalTensorMode",
        "torch.fx.experimental.proxy_tensor": "ProxyTorchDispatchMode",
    }
    if _ABOVE_MODES:
        classes["torch.utils._python_dispatch"] = "TorchDispatchMode"
    before = _Before()
    after_import(
        {name: functools.partial(_wrap_mode, before=before, name=cls) for name, cls in classes.items()}
    )


def _wrap_mode(module: Any, *, before: _Before, name: str) -> None:
    mode = getattr(module, name)
    enter, leave = mode.__enter__, mode.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        before.states.append(_key_is_on(_KEY))
        _set_key(_KEY, False)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            _set_key(_KEY, before.states.pop())

    mode.__enter__, mode.__exit__ = entered, left


def _let_higher_order_operators_through() -> None:
    """They look for a kernel under every key; their inner operations come by one by one."""
    kind: Any = torch._ops.HigherOrderOperator
    for existing in list(torch._ops._higher_order_ops.values()):
        existing.fallthrough(_KEY)
    create = kind.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.fallthrough(_KEY)

    kind.__init__ = init


def _let_views_through() -> Any:
    """Registers that operations whose results only alias their inputs skip the key.

    Besides being quick, this is needed: PyTorch makes a ``Parameter`` of a fresh ``detach()``, which must not
    have been a Python object before.
    """
    library: Any = torch.library.Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        returns = schema.returns
        if schema.name == "aten::lift_fresh":  # the last that is seen of `torch.tensor(…, device="cuda")`
            continue
        if schema.name.startswith("aten::") and returns and all(map(_only_aliases, returns)):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            library.m.impl(schema.name[6:] + overload, "Fake", torch.library.fallthrough_kernel, False)
    return library


def _let_subclasses_through(called: Callable[..., Any]) -> Any:
    """Registers each operation by itself: up to PyTorch 2.11 a fallback is not found for tensors of classes
    that have a say in dispatch (DTensor). They go on to their class, whose operations on plain tensors come
    by."""
    views = {
        (schema.name, schema.overload_name)
        for schema in torch._C._jit_get_all_schemas()
        if schema.returns and all(map(_only_aliases, schema.returns))
    }
    library: Any = torch.library.Library("aten", "IMPL")
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.partition(".")
        if name.startswith("aten::") and (name, overload) not in views:
            library.m.impl(full_name[6:], "Fake", _registered(name[6:], overload, called), False)
    return library


def _registered(name: str, overload: str, called: Callable[..., Any]) -> Callable[..., Any]:
    python = torch._C.DispatchKey.Python
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def run(*args: Any, **kwargs: Any) -> Any:
        func = getattr(getattr(torch.ops.aten, name), overload or "default")
        keys = [
            torch._C._dispatch_keys(value) for value in tree_flatten((args, kwargs))[0] if _is_special(value)
        ]
        if not any(key.has(python) for key in keys):
            return called(func, *args, **kwargs)
        here = torch._C._dispatch_tls_local_include_set() - torch._C._dispatch_tls_local_exclude_set()
        return func.redispatch(functools.reduce(operator.or_, keys, here) & below, *args, **kwargs)

    return run


def _is_special(value: Any) -> bool:
    """Whether it is a tensor of a subclass."""
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def _only_aliases(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


@contextlib.contextmanager
def standing_back() -> Iterator[None]:
    """Inside, operations of this thread are not intercepted: what they take without it can be measured."""
    was_on = _key_is_on(_KEY)
    _set_key(_KEY, False)
    try:
        yield
    finally:
        _set_key(_KEY, was_on)
