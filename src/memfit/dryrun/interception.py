"""Seeing every operation just before its kernel, without PyTorch noticing.

A dispatch mode would see the same operations, but PyTorch behaves differently while one is active: derivative
formulas and composite operations then avoid working in place (``isTensorSubclassLike`` is true for every
tensor), so that ``gather``'s backward, for one, holds an extra tensor as large as its input. So this does not
use a mode. It puts a Python function under the dispatch key ``Fake``, which no part of PyTorch uses and which
lies below autograd, tensor subclasses and modes, and switches the key on for this thread (and those that
autograd starts for it).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

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


class Interception:
    """Calls a handler in place of every operation of this process, once installed.

    Operations that only make views are not seen: they neither allocate nor read.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._before = _Before()
        self._libraries: list[Any] = []

    def install(self) -> None:
        """Begin. It lasts for the life of the process; forks of it are left alone."""
        handler, keys, exclude = self._handler, _KEYS, torch._C._ExcludeDispatchKeyGuard

        def called(func: Any, *args: Any, **kwargs: Any) -> Any:
            with exclude(keys):
                return handler(func, args, kwargs)

        everything = torch.library.Library("_", "IMPL")
        everything.fallback(called, "Fake")
        self._libraries = [everything, _let_views_through()]
        self._stand_back_from_modes()
        _let_higher_order_operators_through()
        _set_key(_KEY, True)
        os.register_at_fork(after_in_child=lambda: _set_key(_KEY, False))

    def _stand_back_from_modes(self) -> None:
        """While fake tensors are traced (torch.compile) nothing runs on the device: the key is off."""
        classes = {
            "torch._subclasses.fake_tensor": "FakeTensorMode",
            "torch._subclasses.functional_tensor": "FunctionalTensorMode",
            "torch.fx.experimental.proxy_tensor": "ProxyTorchDispatchMode",
        }
        if _ABOVE_MODES:
            classes["torch.utils._python_dispatch"] = "TorchDispatchMode"
        after_import(
            {name: functools.partial(self._wrap_mode, class_name=cls) for name, cls in classes.items()}
        )

    def _wrap_mode(self, module: Any, *, class_name: str) -> None:
        mode = getattr(module, class_name)
        enter, leave, before = mode.__enter__, mode.__exit__, self._before

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
    operator: Any = torch._ops.HigherOrderOperator
    for existing in list(torch._ops._higher_order_ops.values()):
        existing.fallthrough(_KEY)
    create = operator.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.fallthrough(_KEY)

    operator.__init__ = init


def _let_views_through() -> Any:
    """Registers that operations whose results only alias their inputs skip the key.

    Besides being quick, this is needed: PyTorch makes a ``Parameter`` of a fresh ``detach()``, which must not
    have been a Python object before.
    """
    library: Any = torch.library.Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        returns = schema.returns
        if schema.name.startswith("aten::") and returns and all(map(_only_aliases, returns)):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            library.m.impl(schema.name[6:] + overload, "Fake", torch.library.fallthrough_kernel, False)
    return library


def _only_aliases(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write
