"""The forward that a checkpointed block has instead of its own: set on the instance, so that the module
stays itself.

Module identity, class, ``state_dict`` keys and hooks do not change (hooks of the block run once, outside of
the recompute). The object refers to its block weakly, so a dropped model is freed at once, and is copied and
pickled with it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import UsageError
from memfit.techniques.module_state import BlockMemory, StateWatch
from memfit.techniques.saved_operations import SavedOperations
from memfit.techniques.selective import Replay, selective_modes

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class CheckpointedForward:
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
        self._block = weakref.ref(block)
        self.name = name
        self.saves = saves
        self._saved = SavedOperations.parse(saves, place=f"block {name!r}") if saves else None
        self._previous = previous
        self._memory = BlockMemory(name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self._block(), self.name, self.saves, self._previous)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original())

    @property
    def previous(self) -> Callable[..., Any] | None:
        return self._previous

    def original(self) -> Callable[..., Any]:
        """The block's forward without checkpointing."""
        if self._previous is not None:
            return self._previous
        block = self._block()
        assert block is not None, "a forward outlived its block"
        forward: Callable[..., Any] = type(block).forward.__get__(block)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original()
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler's partitioner keeps buffers and random state right by itself, and knows no
            # dispatch modes.
            return checkpoint(original, *args, use_reentrant=False, **kwargs)
        return self._checkpointed(original, args, kwargs)

    def _checkpointed(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        block = self._block()
        assert block is not None, "a forward outlived its block"
        args, kwargs = without_caches(block, self.name, args, kwargs)
        tensors: list[torch.Tensor] = []
        args, kwargs = (
            _take_out(args, tensors),
            {key: _take_out(value, tensors) for key, value in kwargs.items()},
        )

        def run(*given: torch.Tensor) -> Any:
            return original(
                *_put_back(args, given), **{key: _put_back(value, given) for key, value in kwargs.items()}
            )

        watch = StateWatch(block, self._memory)
        # Every tensor goes in by position: PyTorch looks for devices (random state) and nesting among those
        # only.
        output = checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: self._contexts(watch))
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


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with tensors replaced by slots. Looks into tuples only: a list or dict may be there to be
    filled."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    return tuple(_take_out(inner, tensors) for inner in value) if type(value) is tuple else value


def _put_back(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    return tuple(_put_back(inner, tensors) for inner in value) if type(value) is tuple else value


def without_caches(block: nn.Module, name: str, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments with empty key/value caches (transformers) taken away, as transformers' own
    checkpointing does: a recompute would append to the cache a second time.

    Raises:
        UsageError: a cache that holds something (a prefix), which the block needs.
    """
    layer = next((m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)), 0)

    def stripped(value: Any) -> Any:
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if int(value.get_seq_length(layer)) > 0:
            raise UsageError(
                f"block {name!r} was given a key/value cache that is not empty; a recompute would append to "
                "it again. Leave gradient checkpointing off where a cache with a prefix is trained (prefix "
                "tuning)"
            )
        return None

    kwargs = {key: stripped(value) for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(stripped(value) for value in args), kwargs
