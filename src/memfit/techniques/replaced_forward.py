"""A forward that is set on a module's instance in place of its class's, so that the module stays itself."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo


class ReplacedForward:
    """A forward set on a module's instance: refers to its module weakly, is copied and pickled with it."""

    def __init__(self, module: nn.Module, previous: Callable[..., Any] | None = None) -> None:
        self._module = weakref.ref(module)
        self._previous = previous

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._previous)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original())

    @property
    def previous(self) -> Callable[..., Any] | None:
        """The forward that was set on the instance before, if any."""
        return self._previous

    def original(self) -> Callable[..., Any]:
        """The forward that this one replaces."""
        if self._previous is not None:
            return self._previous
        module = self._module()
        assert module is not None, "a forward outlived its module"
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return forward


def set_forwards(forwards: Iterable[tuple[nn.Module, ReplacedForward]], technique: str) -> Undo:
    """Puts each forward on its module; gives back what takes them off again. Holds the modules weakly.

    Taking them off raises UsageError, and changes nothing, where another forward is on top of one.
    """
    placed = []
    for module, forward in forwards:
        module.forward = forward  # type: ignore[assignment]
        placed.append((weakref.ref(module), forward))

    def undo() -> None:
        there = [(module, forward) for reference, forward in placed if (module := reference()) is not None]
        for module, forward in {id(module): (module, forward) for module, forward in there}.values():
            if vars(module).get("forward") is not forward:
                raise UsageError(
                    f"the forward of a {type(module).__name__} was replaced after {technique} was "
                    "applied; take that replacement back first"
                )
        for module, forward in reversed(there):
            del module.forward
            if forward.previous is not None:
                module.forward = forward.previous

    return undo
