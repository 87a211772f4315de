"""Items to devices so that the last one is done as early as can be, within each device's memory.

The exact search goes depth first from the costliest item on and drops what cannot beat the best that is
known; it begins from the greedy assignment improved by moves and swaps. Where it ends before its budget of
nodes does, the result is proven optimal; else the lower bound says how far from it the result may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes
from memfit.distributed.balance import Device

SEARCH_NODES = 100_000
_MOST_ROUNDS = 200


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Items with a cost and a size each, for devices that may hold `most_items` of them."""

    costs: tuple[float, ...]
    sizes_bytes: tuple[int, ...]
    devices: tuple[Device, ...]
    most_items: int | None = None

    @property
    def longest_first(self) -> list[int]:
        """The items by falling cost, then size, then number."""
        return sorted(range(len(self.costs)), key=lambda i: (-self.costs[i], -self.sizes_bytes[i], i))


@dataclass(kw_only=True)
class Loads:
    """What lies on the devices of a problem now."""

    problem: Problem
    device_of: list[int]
    costs: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = len(self.problem.devices)
        self.costs, self.held_bytes, self.counts = [0.0] * number, [0] * number, [0] * number
        for item, device in enumerate(self.device_of):
            if device >= 0:
                self._add(item, device, 1)

    def put(self, item: int, device: int) -> None:
        """Moves an item to a device; -1 takes it off."""
        if self.device_of[item] >= 0:
            self._add(item, self.device_of[item], -1)
        self.device_of[item] = device
        if device >= 0:
            self._add(item, device, 1)

    def _add(self, item: int, device: int, sign: int) -> None:
        self.costs[device] += sign * self.problem.costs[item]
        self.held_bytes[device] += sign * self.problem.sizes_bytes[item]
        self.counts[device] += sign

    def has_room(self, item: int, device: int, *, without: int | None = None) -> bool:
        """Whether an item fits on a device, from which the item ``without`` is taken first."""
        gone = 0 if without is None else self.problem.sizes_bytes[without]
        limit, most = self.problem.devices[device].memory_bytes, self.problem.most_items
        held = self.held_bytes[device] - gone + self.problem.sizes_bytes[item]
        count = self.counts[device] + 1 - (without is not None)
        return (limit is None or held <= limit) and (most is None or count <= most)

    def seconds(self, device: int) -> float:
        """How long a device works."""
        return self.costs[device] / self.problem.devices[device].speed

    def seconds_with(self, item: int, device: int) -> float:
        """How long it would work with one more item."""
        return (self.costs[device] + self.problem.costs[item]) / self.problem.devices[device].speed

    @property
    def makespan(self) -> float:
        """When the last device is done."""
        return max(self.seconds(device) for device in range(len(self.costs)))


def greedy(problem: Problem, order: Sequence[int], *, keep_limits: bool) -> Loads | None:
    """Each item in turn to the device that would be done with it first; None where one fits nowhere."""
    loads = Loads(problem=problem, device_of=[-1] * len(problem.costs))
    for item in order:
        open_to = [d for d in range(len(problem.devices)) if not keep_limits or loads.has_room(item, d)]
        if not open_to:
            return None
        loads.put(item, min(open_to, key=lambda device: (loads.seconds_with(item, device), device)))
    return loads


def lower_bound(problem: Problem) -> float:
    """No assignment ends earlier: the work spread over all speeds, and the k + 1 costliest items on the k
    fastest devices and beyond."""
    speeds = sorted((device.speed for device in problem.devices), reverse=True)
    costs = sorted(problem.costs, reverse=True)
    bound = sum(costs) / sum(speeds)
    for count in range(1, min(len(costs), len(speeds)) + 1):
        # The `count` costliest items lie on some devices; on the fastest ones at best.
        bound = max(bound, sum(costs[:count]) / sum(speeds[:count]))
    pairs = costs[len(speeds) - 1 : len(speeds) + 1]
    if len(pairs) == 2 and len(set(speeds)) == 1:  # two of the n + 1 costliest share a device
        bound = max(bound, sum(pairs) / speeds[0])
    return bound


def best_assignment(problem: Problem) -> tuple[list[int], float, bool]:
    """The device of each item, a lower bound in seconds, and whether the result is proven best.

    Raises:
        UsageError: the items do not fit the devices' memory, or no way to fit them was found.
    """
    bound = lower_bound(problem)
    start = greedy(problem, problem.longest_first, keep_limits=True) or _by_size(problem)
    if start is not None:
        improve(start)
    search = _Search(problem, start, bound)
    search.run()
    if search.best is None:
        raise UsageError(_does_not_fit(problem, proven=search.complete))
    if search.complete:
        return search.best, search.best_seconds, True
    return search.best, bound, search.best_seconds <= bound * (1 + 1e-12)


def _by_size(problem: Problem) -> Loads | None:
    """The largest first, each where most memory is free: for items that are hard to fit at all."""
    loads = Loads(problem=problem, device_of=[-1] * len(problem.costs))
    for item in sorted(range(len(problem.costs)), key=lambda i: (-problem.sizes_bytes[i], i)):
        open_to = [d for d in range(len(problem.devices)) if loads.has_room(item, d)]
        if not open_to:
            return None
        loads.put(item, max(open_to, key=lambda d: (_free(loads, d), -loads.seconds(d), -d)))
    return loads


def _free(loads: Loads, device: int) -> float:
    limit = loads.problem.devices[device].memory_bytes
    return float("inf") if limit is None else limit - loads.held_bytes[device]


def improve(loads: Loads) -> None:
    """Moves and swaps items away from the slowest device for as long as that makes it faster."""
    for _ in range(_MOST_ROUNDS):
        slow = max(range(len(loads.costs)), key=loads.seconds)
        if not _improve_one(loads, slow, loads.makespan * (1 - 1e-12)):
            return


def _improve_one(loads: Loads, slow: int, limit: float) -> bool:
    mine = [item for item, device in enumerate(loads.device_of) if device == slow]
    others = [device for device in range(len(loads.costs)) if device != slow]
    for item in mine:
        for device in others:
            if loads.has_room(item, device) and loads.seconds_with(item, device) < limit:
                loads.put(item, device)
                return True
    for item in mine:
        for other, device in enumerate(loads.device_of):
            if device == slow or not _swap_helps(loads, item, other, limit):
                continue
            loads.put(item, -1)
            loads.put(other, slow)
            loads.put(item, device)
            return True
    return False


def _swap_helps(loads: Loads, item: int, other: int, limit: float) -> bool:
    slow, device = loads.device_of[item], loads.device_of[other]
    problem = loads.problem
    change = problem.costs[item] - problem.costs[other]
    if change <= 0 or (loads.costs[device] + change) / problem.devices[device].speed >= limit:
        return False
    return loads.has_room(item, device, without=other) and loads.has_room(other, slow, without=item)


class _Search:
    """Depth first over items by falling cost; devices that are alike and empty are tried once."""

    def __init__(self, problem: Problem, start: Loads | None, bound: float) -> None:
        self.problem = problem
        self.order = problem.longest_first
        self.best = None if start is None else list(start.device_of)
        self.best_seconds = float("inf") if start is None else start.makespan
        self.bound = bound
        self.nodes = 0
        self.complete = True
        self._loads = Loads(problem=problem, device_of=[-1] * len(problem.costs))
        self._speed = sum(device.speed for device in problem.devices)

    def run(self) -> None:
        """Searches to the end, or until the budget of nodes is used up (``complete`` says which)."""
        depth, choices = 0, [self._choices(0)]
        while choices and self.complete and self.best_seconds > self.bound * (1 + 1e-12):
            item = self.order[depth] if depth < len(self.order) else -1
            if item >= 0 and self._loads.device_of[item] >= 0:
                self._loads.put(item, -1)
            if not choices[-1]:
                choices.pop()
                depth -= 1
                continue
            self.nodes += 1
            self.complete = self.nodes < SEARCH_NODES
            self._loads.put(item, choices[-1].pop())
            if self._loads.makespan >= self.best_seconds * (1 - 1e-12):
                continue
            if depth + 1 == len(self.order):
                self.best, self.best_seconds = list(self._loads.device_of), self._loads.makespan
                continue
            depth += 1
            choices.append(self._choices(depth))

    def _choices(self, depth: int) -> list[int]:
        """The devices worth trying for the item at ``depth``, the best last."""
        if depth >= len(self.order):
            return []
        item, seen, open_to = self.order[depth], set(), []
        for index, device in enumerate(self.problem.devices):
            state = (self._loads.costs[index], self._loads.held_bytes[index], self._loads.counts[index])
            alike = (device.speed, device.memory_bytes, *state)
            fast_enough = self._loads.seconds_with(item, index) < self.best_seconds * (1 - 1e-12)
            if alike not in seen and fast_enough and self._loads.has_room(item, index):
                open_to.append(index)
            seen.add(alike)
        return sorted(open_to, key=lambda d: (-self._loads.seconds_with(item, d), -d))


def _does_not_fit(problem: Problem, *, proven: bool) -> str:
    needed = sum(problem.sizes_bytes)
    limits = ", ".join(
        f"{d.name} {'no limit' if d.memory_bytes is None else format_bytes(d.memory_bytes)}"
        for d in problem.devices
    )
    most = "" if problem.most_items is None else f", {problem.most_items} items a device"
    verdict = "do not fit" if proven else f"were not made to fit in {SEARCH_NODES:,} tries"
    return (
        f"{len(problem.costs)} items of {format_bytes(needed)} together (largest "
        f"{format_bytes(max(problem.sizes_bytes, default=0))}) {verdict} on these devices ({limits}{most}): "
        "take more or larger devices, or smaller items"
    )
