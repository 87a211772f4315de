"""How evenly work lies on devices: the values of load balancing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that takes work.

    Attributes:
        name: for messages.
        memory_bytes: the most that may lie on it; None for no limit.
        speed: work that it does in a second, in the unit that costs have (1.0: costs are seconds).
    """

    name: str
    memory_bytes: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise UsageError(f"device {self.name!r}: speed must be above 0, not {self.speed!r}")
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise UsageError(f"device {self.name!r}: memory_bytes must be 0 or more, not {self.memory_bytes}")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly work lies on devices; one entry a device in each tuple.

    Attributes:
        names: of the devices.
        seconds: how long each works.
        memory_bytes: what lies on each.
        limits_bytes: what each may hold; None for no limit.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    limits_bytes: tuple[int | None, ...]

    @property
    def makespan_seconds(self) -> float:
        """When the last device is done."""
        return max(self.seconds, default=0.0)

    @property
    def imbalance(self) -> float:
        """The slowest device's time as a multiple of the mean: 1 is even."""
        total = sum(self.seconds)
        return self.makespan_seconds * len(self.seconds) / total if total else 1.0

    @property
    def idle_share(self) -> float:
        """The share of all devices' time that is spent waiting for the slowest."""
        return 1 - 1 / self.imbalance

    @property
    def memory_imbalance(self) -> float:
        """The fullest device's bytes as a multiple of the mean: 1 is even."""
        total = sum(self.memory_bytes)
        return max(self.memory_bytes) * len(self.memory_bytes) / total if total else 1.0

    @property
    def over_memory(self) -> tuple[str, ...]:
        """The devices on which more lies than they hold."""
        rows = zip(self.names, self.memory_bytes, self.limits_bytes, strict=True)
        return tuple(name for name, held, limit in rows if limit is not None and held > limit)

    def __str__(self) -> str:
        over = f"; over their memory: {', '.join(self.over_memory)}" if self.over_memory else ""
        time = (
            f"slowest {format_seconds(self.makespan_seconds)}, {self.imbalance:.2f} of the mean "
            f"({self.idle_share:.0%} idle)"
        )
        memory = f"fullest {format_bytes(max(self.memory_bytes, default=0))}"
        memory = f"{memory}, {self.memory_imbalance:.2f} of the mean" if any(self.memory_bytes) else ""
        return "; ".join(filter(None, (time if any(self.seconds) else "", memory))) + over


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which device takes which item.

    Attributes:
        strategy: that made it.
        device_of: the device's index, for each item.
        before: the balance without a strategy: items dealt out in turns, or cut into equal counts.
        after: the balance of this assignment.
        lower_bound_seconds: no assignment that keeps the memory limits ends earlier.
        optimal: whether it is proven that none is better.
    """

    strategy: str
    device_of: tuple[int, ...]
    before: Balance
    after: Balance
    lower_bound_seconds: float
    optimal: bool

    @property
    def gap(self) -> float:
        """The most by which a better one may end earlier, as a share of the lower bound."""
        if self.optimal or not self.lower_bound_seconds:
            return 0.0
        return max(0.0, self.after.makespan_seconds / self.lower_bound_seconds - 1)

    def items_of(self, device: int) -> tuple[int, ...]:
        """The items of one device, in order."""
        return tuple(item for item, taken in enumerate(self.device_of) if taken == device)

    def __str__(self) -> str:
        proof = "optimal" if self.optimal else f"at most {self.gap:.1%} above the best"
        return f"{self.strategy}: {self.after} ({proof}); before: {self.before}"


def balance_of(
    device_of: Sequence[int], costs: Sequence[float], sizes_bytes: Sequence[int], devices: Sequence[Device]
) -> Balance:
    """The balance of items on devices: costs added up over the device's speed, sizes added up."""
    loads, held = [0.0] * len(devices), [0] * len(devices)
    for index, cost, size in zip(device_of, costs, sizes_bytes, strict=True):
        loads[index] += cost
        held[index] += size
    return Balance(
        names=tuple(device.name for device in devices),
        seconds=tuple(load / device.speed for load, device in zip(loads, devices, strict=True)),
        memory_bytes=tuple(held),
        limits_bytes=tuple(device.memory_bytes for device in devices),
    )
