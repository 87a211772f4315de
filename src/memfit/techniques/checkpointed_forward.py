"""The forward that a checkpointed block has instead of its own: set on the instance, so that the module
stays itself.

Module identity, class, ``state_dict`` keys and hooks do not change (hooks of the block run once, outside of
the recompute). The object refers to its block weakly, so a dropped model is freed at once, and is copied and
pickled with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import UsageError
from memfit.techniques.key_value_caches import CacheSeed, is_cache, seed_of
from memfit.techniques.module_state import BlockMemory, StateWatch
from memfit.techniques.replaced_forward import ReplacedForward
from memfit.techniques.saved_operations import SavedOperations
from memfit.techniques.selective import Replay, selective_modes

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class CheckpointedForward(ReplacedForward):
    """Runs a block's own forward under activation checkpointing whenever gradients are recorded.

    Args:
        block: the module whose ``forward`` this replaces.
        name: what messages call the block.
        saves: names of the operations whose outputs are kept (see ``selective``); none: all is recomputed.
        previous: a ``forward`` that was set on the instance before, if any.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        saves: tuple[str, ...] = (),
        previous: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(block, previous)
        self.name = name
        self.saves = saves
        self._saved = SavedOperations.parse(saves, place=f"block {name!r}") if saves else None
        self._memory = BlockMemory(name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self._module(), self.name, self.saves, self._previous)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original()
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler keeps buffers and random state right by itself, and chooses what to keep by itself.
            # What a checkpointed region changes beside its outputs it cannot trace: so no caches.
            kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
            args = tuple(None if is_cache(value) else value for value in args)
            return checkpoint(original, *args, use_reentrant=False, **kwargs)
        return self._checkpointed(original, args, kwargs)

    @_disable_dynamo
    def _checkpointed(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        block = self._module()
        assert block is not None, "a forward outlived its block"
        arguments = _Arguments(block, self.name, args, kwargs)

        def run(*tensors: torch.Tensor) -> Any:
            args, kwargs = arguments.with_tensors(tensors)
            return original(*args, **kwargs)

        watch = StateWatch(block, self._memory)
        # All tensors go in by position: PyTorch looks for devices (random state) and nesting among those.
        output = checkpoint(
            run, *arguments.tensors, use_reentrant=False, context_fn=lambda: self._contexts(watch)
        )
        watch.finish()
        return output

    def _contexts(self, watch: StateWatch) -> Contexts:
        if self._saved is None:
            return nullcontext(), _Recompute(watch, None)
        keep, replay = selective_modes(self._saved, block=self.name)
        return keep, _Recompute(watch, replay)


class _Recompute:
    """The context of a recompute: the state from before the forward, and the saved outputs. Entered once per
    backward."""

    def __init__(self, watch: StateWatch, replay: Replay | None) -> None:
        self._watch = watch
        self._replay = replay
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._watch.replay())
        if self._replay is not None:
            stack.enter_context(self._replay)
        self._open.append(stack)

    def __exit__(self, *exc: Any) -> bool | None:
        return self._open.pop().__exit__(*exc)


class _Slot:
    """Stands for the n-th tensor among a call's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Arguments:
    """A call's arguments, to be given again: tensors by slot, caches by what they were. All else as it is."""

    def __init__(self, block: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._block, self._name = block, name
        self._args = self._taken_out(args)
        self._kwargs = {key: self._taken_out(value) for key, value in kwargs.items()}
        del self._block

    def with_tensors(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, dict[str, Any]]:
        """The arguments for one run of the block."""
        return _put_back(self._args, tensors), {k: _put_back(v, tensors) for k, v in self._kwargs.items()}

    def _taken_out(self, value: Any) -> Any:
        """Looks into tuples only: a list or dict may be there to be filled."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _Slot(len(self.tensors) - 1)
        if type(value) is tuple:
            return tuple(self._taken_out(inner) for inner in value)
        if isinstance(value, Iterator):
            raise UsageError(
                f"block {self._name!r} is given a {type(value).__name__}, which gives its values once, and "
                "a block that is recomputed reads them twice; give it a list, or leave the block out"
            )
        return seed_of(value, self._block, self._name) if is_cache(value) else value


def _put_back(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, CacheSeed):
        return value.make()
    return tuple(_put_back(inner, tensors) for inner in value) if type(value) is tuple else value
