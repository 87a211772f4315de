"""`LoadBalancing`: batches, layers, experts and samples of unequal length to devices that may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memfit.core.errors import UsageError
from memfit.distributed.assigning import Problem, best_assignment, greedy, lower_bound
from memfit.distributed.balance import Assignment, Balance, Device, balance_of
from memfit.distributed.partition import (
    Layers,
    best_partition,
    equal_counts,
    filled_in_turn,
    stage_of_layers,
)

Strategy = Literal["round_robin", "least_loaded", "memory_aware"]


@dataclass(frozen=True)
class LoadBalancing:
    """Gives work to devices, and says how even it was before and after.

    ``round_robin`` deals out in turns and looks at nothing; ``least_loaded`` gives each item, as it comes, to
    the device that would be done first; ``memory_aware`` looks for the assignment in which the slowest device
    is done first while each keeps its memory: `Assignment.optimal` says whether that is proven, and
    `Assignment.gap` how far from it the result can be at most. The first two do not keep memory limits;
    `Balance.over_memory` says where they were broken.

    Examples:
        >>> from memfit.distributed import Device
        >>> devices = [Device(name="h100", speed=2.0), Device(name="a100")]
        >>> result = LoadBalancing("memory_aware").assign([4.0, 3.0, 3.0, 2.0], devices)
        >>> result.after.makespan_seconds, result.before.makespan_seconds, result.optimal
        (4.0, 5.0, True)
    """

    strategy: Strategy = "memory_aware"

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise UsageError(
                f"strategy must be one of {', '.join(get_args(Strategy))}, not {self.strategy!r}"
            )

    def assign(
        self,
        costs: Sequence[float],
        devices: Sequence[Device] | int,
        *,
        sizes_bytes: Sequence[int] | None = None,
        most_items: int | None = None,
    ) -> Assignment:
        """Items in any order: experts, shards, jobs.

        Args:
            costs: of each item, in seconds at speed 1.
            devices: that take them, or how many equal ones.
            sizes_bytes: what each item holds; nothing unless given.
            most_items: the most items a device may have (``memory_aware`` keeps it).

        Raises:
            UsageError: a negative cost, or items that do not fit (``memory_aware``).
        """
        known = _devices(devices)
        sizes = _sizes(sizes_bytes, len(costs), "sizes_bytes")
        problem = Problem(costs=_costs(costs), sizes_bytes=sizes, devices=known, most_items=most_items)
        dealt = [item % len(known) for item in range(len(costs))]
        bound, optimal, chosen = lower_bound(problem), False, dealt
        if self.strategy == "least_loaded":
            loads = greedy(problem, range(len(costs)), keep_limits=False)
            chosen = loads.device_of if loads is not None else dealt
        elif self.strategy == "memory_aware":
            chosen, bound, optimal = best_assignment(problem)
        return self._result(chosen, dealt, problem.costs, sizes, known, bound, optimal)

    def split_layers(
        self,
        costs: Sequence[float],
        devices: Sequence[Device] | int,
        *,
        weights_bytes: Sequence[int] | None = None,
        activations_bytes: Sequence[int] | None = None,
        micro_batches: int = 1,
    ) -> Assignment:
        """Layers to the stages of a pipeline: contiguous, in order, a layer or more each.

        ``memory_aware`` is the optimal partition. ``activations_bytes`` are of one micro-batch; a stage keeps
        as many as stages follow it, itself included, at most ``micro_batches`` (the schedule 1F1B).

        Raises:
            UsageError: fewer layers than devices, or no partition keeps the memory.
        """
        known = _devices(devices)
        if len(costs) < len(known):
            raise UsageError(f"{len(costs)} layers cannot fill {len(known)} stages: take fewer devices")
        layers = Layers(
            costs=_costs(costs),
            weights_bytes=_sizes(weights_bytes, len(costs), "weights_bytes"),
            activations_bytes=_sizes(activations_bytes, len(costs), "activations_bytes"),
            devices=known,
            micro_batches=micro_batches,
        )
        equal = equal_counts(len(costs), len(known))
        ways: dict[str, Callable[[], list[int]]] = {
            "round_robin": lambda: equal,
            "least_loaded": lambda: filled_in_turn(layers),
            "memory_aware": lambda: best_partition(layers),
        }
        before, after = _staged(layers, equal), _staged(layers, chosen := ways[self.strategy]())
        optimal = self.strategy == "memory_aware"
        bound = max(sum(costs) / sum(d.speed for d in known), max(costs) / max(d.speed for d in known))
        return Assignment(
            strategy=self.strategy,
            device_of=stage_of_layers(chosen),
            before=before,
            after=after,
            lower_bound_seconds=after.makespan_seconds if optimal else bound,
            optimal=optimal,
        )

    def split_batch(
        self, samples: int, devices: Sequence[Device] | int, *, bytes_per_sample: int = 0
    ) -> Assignment:
        """How many of a batch's equal samples each device takes; the samples of a device lie together.

        ``memory_aware`` is optimal: sample by sample to the device that is done first with one more, while it
        has room.

        Raises:
            UsageError: a batch that does not fit (``memory_aware``).
        """
        known = _devices(devices)
        costs, sizes = [1.0] * samples, [bytes_per_sample] * samples
        problem = Problem(costs=tuple(costs), sizes_bytes=tuple(sizes), devices=known)
        dealt = sorted(item % len(known) for item in range(samples))
        chosen, optimal = dealt, False
        if self.strategy != "round_robin":
            optimal = self.strategy == "memory_aware"
            loads = greedy(problem, range(samples), keep_limits=optimal)
            if loads is None:
                room = sum((d.memory_bytes or 0) // max(bytes_per_sample, 1) for d in known)
                raise UsageError(
                    f"a batch of {samples} does not fit: the devices hold {room} samples of "
                    f"{bytes_per_sample:,} bytes together; take a smaller batch or micro-batches"
                )
            chosen = sorted(loads.device_of)
        after = balance_of(chosen, costs, sizes, known).makespan_seconds
        bound = after if optimal else samples / sum(device.speed for device in known)
        return self._result(chosen, dealt, costs, sizes, known, bound, optimal)

    def pack_samples(
        self,
        lengths: Sequence[int],
        devices: Sequence[Device] | int,
        *,
        linear_cost: float = 1.0,
        quadratic_cost: float = 0.0,
        bytes_per_token: int = 0,
    ) -> Assignment:
        """Samples of unequal length to devices.

        Args:
            lengths: tokens of each sample.
            devices: that take them, or how many equal ones.
            linear_cost: seconds of a token (matrix products).
            quadratic_cost: seconds of a pair of tokens (attention).
            bytes_per_token: what a token keeps on the device.

        Raises:
            UsageError: samples that do not fit (``memory_aware``).
        """
        costs = [linear_cost * length + quadratic_cost * length * length for length in lengths]
        return self.assign(costs, devices, sizes_bytes=[bytes_per_token * length for length in lengths])

    def _result(
        self,
        chosen: Sequence[int],
        dealt: Sequence[int],
        costs: Sequence[float],
        sizes: Sequence[int],
        devices: Sequence[Device],
        bound: float,
        optimal: bool,
    ) -> Assignment:
        return Assignment(
            strategy=self.strategy,
            device_of=tuple(chosen),
            before=balance_of(dealt, costs, sizes, devices),
            after=balance_of(chosen, costs, sizes, devices),
            lower_bound_seconds=bound,
            optimal=optimal,
        )


def measured_balance(
    seconds: Sequence[float], memory_bytes: Sequence[int] | None = None, names: Sequence[str] | None = None
) -> Balance:
    """The balance of times that were measured, one a rank (`DistributedMemory` and ranks gather them)."""
    held = tuple(memory_bytes or [0] * len(seconds))
    shown = tuple(names or [f"rank {rank}" for rank in range(len(seconds))])
    if not len(held) == len(shown) == len(seconds):
        raise UsageError(f"{len(seconds)} times, {len(held)} sizes and {len(shown)} names: give one a rank")
    return Balance(names=shown, seconds=tuple(seconds), memory_bytes=held, limits_bytes=(None,) * len(shown))


def measured_speeds(
    devices: Sequence[Device], work: Sequence[float], seconds: Sequence[float]
) -> tuple[Device, ...]:
    """The devices with the speed that they showed: work that each did, over the time that it took."""
    if any(not spent > 0 for spent in seconds):
        raise UsageError(f"seconds must be above 0 on every device, not {list(seconds)}")
    rows = zip(devices, work, seconds, strict=True)
    return tuple(
        Device(name=device.name, memory_bytes=device.memory_bytes, speed=done / spent)
        for device, done, spent in rows
    )


def _devices(devices: Sequence[Device] | int) -> tuple[Device, ...]:
    known = (
        tuple(Device(name=f"device {index}") for index in range(devices))
        if isinstance(devices, int)
        else tuple(devices)
    )
    if not known:
        raise UsageError("no devices to give work to: name one or more")
    return known


def _costs(costs: Sequence[float]) -> tuple[float, ...]:
    wrong = next((cost for cost in costs if not 0 <= cost < float("inf")), None)
    if wrong is not None:
        raise UsageError(f"a cost must be a number of 0 or more, not {wrong!r}")
    return tuple(float(cost) for cost in costs)


def _sizes(sizes: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    known = (0,) * count if sizes is None else tuple(int(size) for size in sizes)
    if len(known) != count or any(size < 0 for size in known):
        raise UsageError(f"{what} must be {count} numbers of bytes, 0 or more, as there are {count} costs")
    return known


def _staged(layers: Layers, ends: Sequence[int]) -> Balance:
    """The balance of stages, each with the micro-batches that it keeps in flight."""
    starts = [0, *ends[:-1]]
    plain = balance_of(stage_of_layers(ends), layers.costs, [0] * len(layers.costs), layers.devices)
    held = tuple(
        layers.stage_bytes(stage, first, end)
        for stage, (first, end) in enumerate(zip(starts, ends, strict=True))
    )
    return Balance(
        names=plain.names, seconds=plain.seconds, memory_bytes=held, limits_bytes=plain.limits_bytes
    )
