"""Finds the repeated blocks of a model (transformer layers, residual blocks, encoder stages) without marks
by the user.

A chain is two or more children of one container that are of the same class, have parameters and are
themselves built of modules. The outermost level counts (so the layers of a mixture of experts, not the
experts), except where the members are stages: members that share few parameter shapes with each other (their
widths differ) and have chains of their own inside. Where a model has no such container, same-class
attributes (``down1``, ``down2`` …) count. A single block of another class in the same container is given as
a chain of one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from memfit.core.errors import UsageError

_ALIKE_SHARE = 0.3
"""Two members are of one kind when the shapes that they have in common hold this share of the smaller one's
parameters. Stages of different width share next to nothing; a residual block with and without a downsample
branch over half."""

_WRAPPERS = (
    "_orig_mod.",
    "module.",
    "base_model.model.",
    "_checkpoint_wrapped_module.",
    "_fsdp_wrapped_module.",
)

Grouping = Callable[[nn.Module], list[list[str]]]
"""A module's children that form chains: paths from the module, one list per chain."""


@dataclass(frozen=True, kw_only=True)
class BlockChain:
    """Repeated blocks of one class, in the order of their container.

    Args:
        names: their fully qualified names in the model.
        class_name: the class that they share.
    """

    names: tuple[str, ...]
    class_name: str


def find_block_chains(model: nn.Module) -> tuple[BlockChain, ...]:
    """The chains of repeated blocks in ``model``; empty when it has none (an LSTM, a single layer).

    Examples:
        >>> from torch import nn
        >>> layer = lambda: nn.TransformerEncoderLayer(16, 2)
        >>> find_block_chains(nn.Sequential(nn.Linear(4, 16), nn.Sequential(layer(), layer())))
        (BlockChain(names=('1.0', '1.1'), class_name='TransformerEncoderLayer'),)
    """
    ways = (_chains_of_container, _chains_of_attributes, _lone_blocks)
    found = [(way, tuple(_chains_in(model, "", way, known=frozenset()))) for way in ways]
    with_heavy = [
        (way, _heavy_classes(model, chains)) for way, chains in found if _heavy_classes(model, chains)
    ]
    if with_heavy:
        way, known = with_heavy[0]
        return tuple(_chains_in(model, "", way, known=known))
    return next((chains for _, chains in found if chains), ())


def block_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all blocks of all chains, chain after chain."""
    return tuple(name for chain in find_block_chains(model) for name in chain.names)


def get_block(model: nn.Module, name: str) -> nn.Module:
    """The module called ``name``, also when the model or the name carries a wrapper's prefix that the other
    lacks.

    Raises:
        UsageError: there is no such module.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return modules[name]
    wanted = _without_wrappers(name)
    for candidate, module in modules.items():
        if _without_wrappers(candidate) == wanted:
            return module
    chains = ", ".join(f"{chain.names[0]} … {chain.names[-1]}" for chain in find_block_chains(model))
    raise UsageError(
        f"the model {type(model).__name__} has no module {name!r}; its blocks are {chains or 'none'}"
    )


def _without_wrappers(name: str) -> str:
    """The name with every wrapper's part removed: a plan made on a bare model fits the wrapped one and
    back."""
    while (shorter := _drop_wrapper(name)) != name:
        name = shorter
    return name


def _drop_wrapper(name: str) -> str:
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            return name[len(prefix) :]
        if prefix != "module." and f".{prefix}" in name:
            return name.replace(f".{prefix}", ".", 1)
    return name


def _chains_in(
    module: nn.Module,
    prefix: str,
    groups_of: Grouping,
    *,
    known: frozenset[type],
    seen: set[int] | None = None,
) -> Iterator[BlockChain]:
    """Walks down. A module of a class in ``known`` (a block of another chain) counts as a block where it
    stands alone."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    chains = groups_of(module)
    for keys in chains:
        yield BlockChain(
            names=tuple(prefix + key for key in keys), class_name=_class_of(_child(module, keys[0])).__name__
        )
    if chains and groups_of is _chains_of_attributes:
        return
    taken = {key.split(".")[0] for keys in chains for key in keys}
    for key, child in _children(module):
        if key in taken or "expert" in key.lower():
            continue
        if _class_of(child) in known and _can_be_block(child):
            yield BlockChain(names=(prefix + key,), class_name=_class_of(child).__name__)
        else:
            yield from _chains_in(child, f"{prefix}{key}.", groups_of, known=known, seen=seen)


def _chains_of_container(module: nn.Module) -> list[list[str]]:
    """The chains among the children of a list, a Sequential or a dict; and across a list of lists, place by
    place."""
    if not _is_container(module):
        return []
    if _is_table(module):
        return _chains_across(module)
    groups = _groups(_children(module))
    chains = [
        keys for keys in groups if len(keys) > 1 and not _are_stages([_child(module, key) for key in keys])
    ]
    return chains + _odd_ones(module, groups, chains)


def _chains_of_attributes(module: nn.Module) -> list[list[str]]:
    """Same-class blocks that are plain attributes (``self.down1``, ``self.down2`` …)."""
    return [keys for keys in _groups(_children(module)) if len(keys) > 1]


def _lone_blocks(module: nn.Module) -> list[list[str]]:
    """A single heavy block in a container: a layer that is called again and again (shared weights)."""
    lone = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module._modules) == 1
    return [keys for keys in _groups(_children(module)) if lone and _is_heavy(_child(module, keys[0]))]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _child(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path)


def _is_container(module: nn.Module) -> bool:
    """A list, a Sequential, a dict, or a user's own class whose children are numbered 0, 1, 2 …"""
    keys = list(module._modules)
    numbered = len(keys) > 1 and keys == [str(number) for number in range(len(keys))]
    return numbered or isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def _is_table(module: nn.Module) -> bool:
    """A list of lists of modules, one inner list per layer (as in many short ViT implementations)."""
    rows = [child for _, child in _children(module)]
    widths = {len(row._modules) for row in rows}
    return len(rows) > 1 and all(_has_no_forward(row) for row in rows) and len(widths) == 1


def _chains_across(module: nn.Module) -> list[list[str]]:
    rows = _children(module)
    places = list(rows[0][1]._modules)
    cells = [[(f"{key}.{place}", row._modules.get(place)) for key, row in rows] for place in places]
    present = [[(path, child) for path, child in column if child is not None] for column in cells]
    return [keys for column in present for keys in _groups(column) if len(keys) > 1]


def _groups(children: list[tuple[str, nn.Module]]) -> list[list[str]]:
    """Keys of the children that can be blocks, by class, classes in order of first appearance."""
    groups: dict[type, list[str]] = {}
    for key, child in children:
        if _can_be_block(child):
            groups.setdefault(_class_of(child), []).append(key)
    return list(groups.values())


def _odd_ones(module: nn.Module, groups: list[list[str]], chains: list[list[str]]) -> list[list[str]]:
    """Single blocks of another class beside a chain that are at least half as heavy as its lightest
    member."""
    if not chains:
        return []
    lightest = min(_parameter_count(_child(module, key)) for keys in chains for key in keys)
    return [
        keys
        for keys in groups
        if len(keys) == 1 and 2 * _parameter_count(_child(module, keys[0])) >= lightest
    ]


def _can_be_block(module: nn.Module) -> bool:
    """Built of modules (checkpointing a lone Linear saves nothing), with parameters, and callable as a
    whole."""
    return bool(module._modules) and not _has_no_forward(module) and any(True for _ in module.parameters())


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _class_of(module: nn.Module) -> type:
    compiled = module._modules.get("_orig_mod")
    return type(compiled) if compiled is not None else type(module)


def _are_stages(members: list[nn.Module]) -> bool:
    """Whether the members are stages of blocks: unlike each other or mere containers, with chains of blocks
    inside."""
    mere = all(_is_container(member) for member in members)
    return (mere or not _some_alike(members)) and any(_has_heavy_chain(member) for member in members)


def _some_alike(blocks: list[nn.Module]) -> bool:
    shapes = [_shapes(block) for block in blocks]
    return any(_common_share(a, b) >= _ALIKE_SHARE for a, b in itertools.pairwise(shapes))


def _shapes(module: nn.Module) -> Counter[torch.Size]:
    return Counter(parameter.shape for parameter in module.parameters())


def _common_share(a: Counter[torch.Size], b: Counter[torch.Size]) -> float:
    smaller = min(_numel(a), _numel(b))
    return _numel(a & b) / smaller if smaller else 0.0


def _numel(shapes: Counter[torch.Size]) -> int:
    return sum(shape.numel() * count for shape, count in shapes.items())


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_heavy_chain(module: nn.Module) -> bool:
    chains = _chains_in(module, "", _chains_of_container, known=frozenset())
    return any(_is_heavy(module.get_submodule(chain.names[0])) for chain in chains)


def _heavy_classes(model: nn.Module, chains: tuple[BlockChain, ...]) -> frozenset[type]:
    firsts = [model.get_submodule(chain.names[0]) for chain in chains]
    return frozenset(_class_of(first) for first in firsts if _is_heavy(first))


def _is_heavy(module: nn.Module) -> bool:
    """More than one matrix or kernel: a block of its own right, not one convolution with its
    normalization."""
    return sum(parameter.dim() > 1 for parameter in module.parameters()) > 1
