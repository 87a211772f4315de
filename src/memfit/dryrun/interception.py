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

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""``handler(func, args, kwargs)``: is to call ``func`` once, and to give its result."""


class _Tracing(threading.local):
    """How many tracing modes are active in this thread; on the thread's own count the key is off."""

    depth = 0


class Interception:
    """Calls a handler in place of every operation of this process, once installed.

    Operations that only make views are not seen: they neither allocate nor read.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tracing = _Tracing()
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
        self._stand_back_from_tracing()
        _set_key(_KEY, True)
        os.register_at_fork(after_in_child=lambda: _set_key(_KEY, False))

    def _stand_back_from_tracing(self) -> None:
        """While fake tensors are traced (torch.compile) nothing runs on the device, and the key is switched
        off."""
        classes = {
            "torch._subclasses.fake_tensor": "FakeTensorMode",
            "torch._subclasses.functional_tensor": "FunctionalTensorMode",
            "torch.fx.experimental.proxy_tensor": "ProxyTorchDispatchMode",
        }
        after_import(
            {name: functools.partial(self._wrap_mode, class_name=cls) for name, cls in classes.items()}
        )

    def _wrap_mode(self, module: Any, *, class_name: str) -> None:
        mode = getattr(module, class_name)
        enter, leave, tracing = mode.__enter__, mode.__exit__, self._tracing

        @functools.wraps(enter)
        def entered(self: Any) -> Any:
            tracing.depth += 1
            _set_key(_KEY, False)
            return enter(self)

        @functools.wraps(leave)
        def left(self: Any, *error: Any) -> Any:
            try:
                return leave(self, *error)
            finally:
                tracing.depth -= 1
                if tracing.depth == 0:
                    _set_key(_KEY, True)

        mode.__enter__, mode.__exit__ = entered, left


def _let_views_through() -> Any:
    """Registers that operations whose results only alias their inputs skip the key.

    Besides being quick, this is needed: PyTorch makes a ``Parameter`` of a fresh ``detach()``, which must not
    have been a Python object before.
    """
    library = torch.library.Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        returns = schema.returns
        if schema.name.startswith("aten::") and returns and all(map(_only_aliases, returns)):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            library.m.impl(schema.name[6:] + overload, "Fake", torch.library.fallthrough_kernel, False)
    return library


def _only_aliases(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write
