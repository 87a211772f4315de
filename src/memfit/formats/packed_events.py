"""Events of a snapshot's history as columns, packed away while the snapshot is still being read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from memfit.formats.fields import LARGEST_ADDRESS, LARGEST_SIZE

_MOST_STACKS_KNOWN = 1 << 16


class Unusual(Exception):
    """An event that the columns have no room for, as PyTorch writes none."""


class PackedEvents:
    """Events in order; going through them makes each anew, with what a history needs of it."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._pools: dict[Any, int] = {None: 0}
        self._stacks: list[Any] = [None]
        self._known: dict[int, int] = {}
        self._columns = array("B"), array("Q"), array("q"), array("Q"), array("I"), array("I")
        self._appends = tuple(column.append for column in self._columns)

    def take(self, event: Any) -> None:
        """Put an event at the end, and empty it.

        Raises:
            Unusual: it is not as PyTorch writes them, or was emptied before.
        """
        if type(event) is not dict:
            raise Unusual("an event that is no dictionary")
        get: Any = event.get
        action, size, stream = get("action"), get("size"), get("stream", 0)
        address, pool = get("addr", get("device_free", 0)), get("pool_id")
        whole = type(address) is type(size) is type(stream) is int and type(action) is str
        if not whole or not (
            0 <= address <= LARGEST_ADDRESS and 0 <= size <= LARGEST_SIZE and 0 <= stream <= LARGEST_ADDRESS
        ):
            raise Unusual("a value that is not of its usual kind")
        to_names, to_addresses, to_sizes, to_streams, to_pools, to_stacks = self._appends
        to_names(self._number(self._names, action, 255))
        to_addresses(address)
        to_sizes(size)
        to_streams(stream)
        to_pools(self._pool(pool) if pool else 0)
        to_stacks(self._stack(event.get("frames")))
        event.clear()

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names, pools, stacks = list(self._names), list(self._pools), self._stacks
        for name, address, size, stream, pool, stack in zip(*self._columns, strict=True):
            yield {
                "action": names[name],
                "addr": address,
                "size": size,
                "stream": stream,
                "pool_id": pools[pool],
                "frames": stacks[stack],
            }

    @staticmethod
    def _number(numbers: dict[Any, int], key: Any, most: int) -> int:
        number = numbers.setdefault(key, len(numbers))
        if number > most:
            raise Unusual("more kinds of values than PyTorch has")
        return number

    def _pool(self, pool: Any) -> int:
        if type(pool) is not tuple or len(pool) != 2 or not type(pool[0]) is type(pool[1]) is int:
            raise Unusual("a pool that is no pair of numbers")
        return self._number(self._pools, pool, 1 << 31)

    def _stack(self, frames: Any) -> int:
        """Stacks that many events share are held once; the number of one that was seen is by its identity,
        which is nobody else's as it is held here."""
        if not frames:
            return 0
        number = self._known.get(id(frames))
        if number is None:
            if len(self._known) == _MOST_STACKS_KNOWN:
                self._known.clear()
            number = self._known[id(frames)] = len(self._stacks)
            self._stacks.append(frames)
        return number
