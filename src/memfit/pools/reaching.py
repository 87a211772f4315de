"""Which tensors can be reached from a variable, and by what way; nothing is kept alive by looking."""

from __future__ import annotations

import inspect
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

DEEPEST = 4
"""How many containers and objects may lie between a variable and its tensor."""

MOST_LOOKED_AT = 20_000
"""Values looked at from one variable: a data set of a million rows is not searched through."""

_NOT_ENTERED = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    type,
    str,
    bytes,
    int,
    float,
    torch.dtype,
    torch.device,
)
_SNAPSHOTS_OF_LOCALS = sys.version_info < (3, 13)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, by its type alone: `isinstance` asks objects what they are, and some answer."""
    return issubclass(type(value), torch.Tensor)


def tensors_in(value: Any, barren: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a value is or holds, with the way to them: ``["batch"][0]``, ``.weight``.

    Args:
        value: where to begin.
        barren: ids of what earlier searches went through without a tensor, with the depth at which they
            came upon it: not searched again from there or deeper. Searches that share it must see the same
            objects, all of them alive.
    """
    waiting: deque[tuple[str, Any, int]] = deque([("", value, 0)])
    seen: dict[int, int] = {}
    any_found = False
    while waiting and len(seen) < MOST_LOOKED_AT:
        path, found, depth = waiting.popleft()
        if id(found) in seen or barren.get(id(found), DEEPEST + 1) <= depth:
            continue
        seen[id(found)] = depth
        if is_tensor(found):
            any_found = True
            yield path, found
        elif depth < DEEPEST:
            waiting.extend((path + name, part, depth + 1) for name, part in parts_of(found))
    if not (any_found or waiting):
        barren.update(seen)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, with the way to each."""
    kind = type(value)
    if issubclass(kind, _NOT_ENTERED):
        return
    if issubclass(kind, dict):
        for key, part in list(value.items()):
            yield f"[{key!r}]" if isinstance(key, str | int) else "[…]", part
    elif issubclass(kind, list | tuple):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif issubclass(kind, set | frozenset | deque):
        for part in list(value):
            yield "[…]", part
    elif kind is types.CellType:
        try:
            yield "", value.cell_contents
        except ValueError:  # not assigned yet
            return
    else:
        yield from _attributes(value)


def variables_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a function's frame, by name. Before Python 3.13 asking for them leaves a second
    reference to each in the frame, which is taken out again."""
    variables = frame.f_locals
    found = list(variables.items())
    if _SNAPSHOTS_OF_LOCALS and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Of an object's own dictionary and of its slots; properties, which would run code, are not asked."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        attributes = None
    if type(attributes) is dict:
        for name, part in list(attributes.items()):
            yield f".{name}", part
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:  # not assigned
                    continue
