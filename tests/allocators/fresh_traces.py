"""Traces made up from a seed, in which the rules of the caching allocator have their turn; and shrinking."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Where a rule changes: the smallest block, the pools, the segment sizes, max_split_size_mb:128.
BORDERS = (512, 1024, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 128 * MIB, 148 * MIB)

Operation = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FreshTrace:
    """Operations as of JSON-lines traces, and the device that they are for."""

    operations: tuple[Operation, ...]
    total_bytes: int
    fraction: float | None

    def json_lines(self) -> str:
        """The trace as ``memfit replay`` reads it."""
        config = {"op": "config", "total_bytes": self.total_bytes, "fraction": self.fraction}
        return "\n".join(json.dumps(entry) for entry in (config, *self.operations))


def fresh_trace(seed: int, *, limited: bool = False, pools: bool = False) -> FreshTrace:
    """A trace of 100 to 400 operations; ``limited``: in any case with a memory fraction, below 1; ``pools``:
    half of its blocks are in one of three private pools, which are let go at times."""
    chance = random.Random(seed)
    total = chance.choice([256 * MIB, 512 * MIB, GIB, 2 * GIB])
    below = chance.choice([0.6, 0.75, 0.9])
    fraction = below if limited else chance.choice([None, None, None, below, below, 1.0])
    return FreshTrace(
        operations=tuple(_Writer(chance, total, pools=pools).write(chance.randint(100, 400))),
        total_bytes=total,
        fraction=fraction,
    )


class _Writer:
    """Keeps alive about what its device holds, so that caches are flushed and requests fail at times."""

    def __init__(self, chance: random.Random, total_bytes: int, *, pools: bool = False) -> None:
        self._chance = chance
        self._total_bytes = total_bytes
        self._aim_bytes = int(total_bytes * chance.choice([0.2, 0.5, 0.8, 1.1]))
        self._streams = chance.choice([1, 2, 3, 4])
        self._kinds = [chance.random() ** 2 + 0.01 for _ in range(5)]
        self._other = chance.choice([0.02, 0.05, 0.12, 0.25])
        self._live: dict[int, int] = {}
        self._next = 0
        self._pools = [1, 2, 3] if pools else []

    def write(self, count: int) -> list[Operation]:
        return [self._operation() for _ in range(count)]

    def _operation(self) -> Operation:
        chance = self._chance
        if chance.random() < self._other:
            return self._other_operation()
        held = sum(self._live.values())
        if self._live and chance.random() < min(0.9, 0.25 + 0.4 * held / self._aim_bytes):
            return self._free()
        if held > self._aim_bytes and self._live and chance.random() < 0.5:
            return self._free()
        self._next += 1
        size = self._live[self._next] = self._size()
        made = {"op": "alloc", "id": self._next, "size": size, "stream": chance.randrange(self._streams)}
        return made | ({"pool": chance.choice(self._pools)} if self._pools and chance.random() < 0.5 else {})

    def _free(self) -> Operation:
        """The newest as often as any: most of what a program makes is short-lived."""
        name = self._pick()
        del self._live[name]
        return {"op": "free", "id": name}

    def _pick(self) -> int:
        names = list(self._live)
        return self._chance.choice([names[-1], self._chance.choice(names)])

    def _other_operation(self) -> Operation:
        what = self._chance.choice(
            [*["record_stream"] * (4 if self._pools else 12), "sync", "empty_cache", "reset_peak"]
        )
        if what != "record_stream":
            if self._pools and chance_of_release(self._chance):
                self._pools = [*self._pools[1:], self._pools[-1] + 1]  # a pool that was let go stays so
                return {"op": "release_pool", "pool": self._pools[0] - 1}
            return {"op": what}
        if not self._live:
            return {"op": "sync"}
        stream = self._chance.randrange(self._streams)
        return {"op": "record_stream", "id": self._pick(), "stream": stream}

    def _size(self) -> int:
        chance = self._chance
        match chance.choices(range(5), self._kinds)[0]:
            case 0:
                return chance.randint(1, 64 * KIB)
            case 1:
                return chance.randint(64 * KIB, 2 * MIB)
            case 2:
                return chance.randint(MIB, 24 * MIB)
            case 3:
                border = chance.choice([border for border in BORDERS if border <= self._total_bytes // 2])
                return border + chance.choice([-512, -1, 0, 0, 1, 512])
            case _:
                return chance.randint(10 * MIB, self._total_bytes // chance.choice([2, 4, 8]))


def chance_of_release(chance: random.Random) -> bool:
    """One in three of the rarer operations, where there are private pools."""
    return chance.random() < 0.33


def shrink(trace: FreshTrace, fails: Callable[[FreshTrace], bool], *, most_tries: int = 400) -> FreshTrace:
    """The trace without what it does not need in order to fail: halves are left out first, then less.

    Ids without an allocation are ignored by whoever replays, so any part may be left out.
    """
    tries = 0
    part = max(1, len(trace.operations) // 2)
    while True:
        at, left_out = 0, False
        while at < len(trace.operations) and tries < most_tries:
            shorter = replace(trace, operations=_without(trace.operations, at, part))
            tries += 1
            if fails(shorter):
                trace, left_out = shorter, True
            else:
                at += part
        if tries >= most_tries or (part == 1 and not left_out):
            return trace
        part = max(1, part // 2)


def _without(operations: Sequence[Operation], start: int, count: int) -> tuple[Operation, ...]:
    return (*operations[:start], *operations[start + count :])
