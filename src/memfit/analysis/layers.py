"""The repeated layers of a model, by the names of its modules: ``h.3.mlp`` belongs to layer ``h.3``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_LAYER = re.compile(r"^(?P<chain>(?:[^.]*\.)*?)(?P<number>\d+)(?:\.|$)")


@lru_cache(maxsize=1 << 16)
def layer_of(module: str) -> str:
    """The layer that a module is in: up to its first number; the module itself where it has none.

    Examples:
        >>> layer_of("transformer.h.3.mlp.c_fc"), layer_of("lm_head")
        ('transformer.h.3', 'lm_head')
    """
    match = _LAYER.match(module)
    return module if match is None else match["chain"] + match["number"]


@lru_cache(maxsize=1 << 16)
def chain_of(module: str) -> str:
    """The chain that a module's layer belongs to, ``"transformer.h."``; ``"?"`` where it is in none."""
    match = _LAYER.match(module)
    return "?" if match is None else match["chain"]


def is_deep(modules: Iterable[str], least: int = 3) -> bool:
    """Whether the modules are of at least ``least`` layers of one chain."""
    layers: dict[str, set[str]] = {}
    for module in modules:
        if chain_of(module) != "?":
            layers.setdefault(chain_of(module), set()).add(layer_of(module))
    return any(len(names) >= least for names in layers.values())
