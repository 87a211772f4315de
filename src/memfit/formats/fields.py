"""Values out of foreign files, checked one by one: a wrong one is named with its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.core.errors import InputError

LARGEST_SIZE = (1 << 63) - 1
LARGEST_ADDRESS = (1 << 64) - 1
_SHOWN = 60


def whole(value: Any, place: str, *, most: int = LARGEST_SIZE, least: int = 0) -> int:
    """A whole number within bounds.

    Raises:
        InputError: it is something else; the message begins with ``place``.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{place} is {shown(value)}, not a whole number")
    if not least <= value <= most:
        raise InputError(f"{place} is {shown(value)}, which is out of range")
    return value


def member(row: Any, key: str, place: str) -> Any:
    """``row[key]`` of what should be a dictionary.

    Raises:
        InputError: it is none, or has no such key.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"{place} is {shown(row)}, not a dictionary")
    try:
        return row[key]
    except KeyError:
        raise InputError(f"{place} has no {key!r}") from None


def listed(value: Any, place: str) -> list[Any]:
    """What should be a list.

    Raises:
        InputError: it is none.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{place} is {shown(value)}, not a list")
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:_SHOWN] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


class Streams:
    """Stream handles as numbers: the default stream is 0, the others count up as they appear.

    A private memory pool has blocks of its own, so each pair of stream and pool counts as a stream.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {(0, None): 0}

    def number(self, handle: int, pool: Any = None) -> int:
        """The number of a stream (in a private pool)."""
        return self._numbers.setdefault((handle, pool), len(self._numbers))

    @property
    def has_private_pools(self) -> bool:
        """Whether any number stands for a private pool."""
        return any(pool is not None for _, pool in self._numbers)

    def private(self) -> dict[int, tuple[int, int]]:
        """For each number that stands for a private pool: the stream's own, and the pool's from 1 on."""
        pools: dict[Any, int] = {}
        return {
            number: (self.number(handle), pools.setdefault(pool, len(pools) + 1))
            for (handle, pool), number in list(self._numbers.items())
            if pool is not None
        }
