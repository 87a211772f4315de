"""Which settings of each technique are worth trying, read off its own fields: new techniques need no word.

A technique with a method ``candidates()`` says it itself. Of every other one the defaults are tried, and each
field in turn with another value: every choice of a ``Literal`` of a few, both truth values, half and twice a
small number, a half where the name asks for a share.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal

from memfit.core.errors import MemfitError
from memfit.planning.figures import Settings

MOST_PER_TECHNIQUE = 6
MOST_CHOICES = 3
SHARE_WORDS = ("savings", "share", "ratio", "fraction")
LARGEST_NUMBER = 64
"""Larger numbers in a technique's settings are no counts of parts that memory would follow."""


def candidate_settings(techniques: Mapping[str, Any] | None = None) -> dict[str, tuple[Settings, ...]]:
    """Settings to try by technique, the defaults first. Loads torch.

    Args:
        techniques: name → class; default: the table of them all.
    """
    if techniques is None:
        from memfit.techniques import TECHNIQUES

        techniques = TECHNIQUES
    return {name: settings_to_try(kind) for name, kind in techniques.items()}


def settings_to_try(kind: Any) -> tuple[Settings, ...]:
    """Settings of one technique that it accepts, without repeats."""
    found: dict[str, Settings] = {}
    for values in _values(kind):
        try:
            settings = kind(**values).to_settings()
        except (MemfitError, TypeError, ValueError):  # it refuses these, or needs more than them
            continue
        found.setdefault(repr(sorted(settings.items(), key=str)), settings)
    return tuple(found.values())[:MOST_PER_TECHNIQUE]


def _values(kind: Any) -> Iterator[dict[str, Any]]:
    own = getattr(kind, "candidates", None)
    if callable(own):
        yield from (dict(values) for values in own())
        return
    yield {}
    hints = _hints(kind)
    for item in fields(kind):
        for value in _variants(item, hints.get(item.name)):
            yield {item.name: value}


def _hints(kind: Any) -> dict[str, Any]:
    """The fields' types; those that only a type checker can see are left out."""
    module = inspect.getmodule(kind)
    names = dict(vars(module)) if module is not None else {}
    found = {}
    for item in fields(kind):
        try:
            found[item.name] = eval(item.type, names) if isinstance(item.type, str) else item.type
        except NameError:
            continue
    return found


def _variants(item: Field[Any], hint: Any) -> tuple[Any, ...]:
    default = None if item.default is MISSING else item.default
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)  # of many, each is a technique of its own kind
            return tuple(choice for choice in choices if choice != default and len(choices) <= MOST_CHOICES)
        if kind is bool:
            return tuple(choice for choice in (True, False) if choice is not default)
        if kind is int:
            return _numbers(default)
        if kind is float and any(word in item.name for word in SHARE_WORDS):
            return (0.5,) if default != 0.5 else ()
    return ()


def _numbers(default: Any) -> tuple[int, ...]:
    if default is None:
        return (2,)
    if isinstance(default, bool) or not 1 <= default <= LARGEST_NUMBER:
        return ()
    return tuple(value for value in (2 * default, default // 2) if value > 1)
