"""Key/value caches (transformers) in the arguments of a block that is recomputed.

A block appends its keys and values to the cache that it is given; a recompute must not append them again. So
each run of the block gets a cache of its own, as the given one was before the forward, for this block's
layer. In training mode the given cache stays as it was, as with transformers' own checkpointing (which gives
the block no cache at all, and so other kernels' rounding); in evaluation mode the forward fills it.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from memfit.core.errors import UsageError


class CacheSeed:
    """A cache argument: what it was before the forward, to make caches from."""

    __slots__ = ("_layer", "_state", "_unused")

    def __init__(self, cache: Any, layer: int | None, unused: Any) -> None:
        self._layer = layer
        self._state = own_copy(cache, layer)
        self._unused = unused

    def make(self) -> Any:
        """A cache for one run of the block: the first time the given one, where that is to be filled."""
        given, self._unused = self._unused, None
        return own_copy(self._state, self._layer) if given is None else given


def is_cache(value: Any) -> bool:
    """Whether an argument is a key/value cache of transformers."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update") and not isinstance(value, nn.Module)


def seed_of(cache: Any, block: nn.Module, name: str) -> CacheSeed:
    """The seed of a cache that ``block`` was given.

    Raises:
        UsageError: the cache writes in place to memory of a fixed size, so it cannot be put back.
    """
    if "Static" in type(cache).__name__ or any("Static" in type(layer).__name__ for layer in _layers(cache)):
        raise UsageError(
            f"block {name!r} was given a cache of fixed size ({type(cache).__name__}), which a recompute "
            "would write to again; train without it (use_cache=False)"
        )
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    layer = next((number for number in numbers if isinstance(number, int)), None)
    return CacheSeed(cache, layer, unused=None if block.training else cache)


def own_copy(cache: Any, layer: int | None) -> Any:
    """A cache with the same content for ``layer``; other layers' content is not kept alive (``None``: all
    layers)."""
    made = copy.copy(cache)
    for key, value in vars(cache).items():
        if is_cache(value):
            setattr(made, key, own_copy(value, layer))
        elif isinstance(value, dict):
            setattr(made, key, dict(value))
    if hasattr(cache, "layers"):
        made.layers = _copied_layers(cache.layers, layer)
    return made


def _copied_layers(layers: list[Any], layer: int | None) -> list[Any]:
    if layer is None:
        return [_copied_layer(each) for each in layers]
    # A layer that is not there yet is made by the first update, which wants those before it too.
    return [_copied_layer(layers[layer]) for _ in layers] if layer < len(layers) else []


def _copied_layer(layer: Any) -> Any:
    made = copy.copy(layer)
    for key, value in vars(layer).items():
        if isinstance(value, (dict, list)):
            setattr(made, key, copy.copy(value))
    return made


def _layers(cache: Any) -> list[Any]:
    inner = [value for value in vars(cache).values() if is_cache(value)]
    return [*getattr(cache, "layers", ()), *(layer for each in inner for layer in _layers(each))]
