"""Layers to pipeline stages: contiguous pieces whose slowest is as fast as can be, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes
from memfit.distributed.balance import Device


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a pipeline and its stages, in order.

    Attributes:
        costs: of each layer, in seconds at speed 1.
        weights_bytes: parameters, gradients and optimizer state of each.
        activations_bytes: what one micro-batch keeps of each for the backward pass.
        devices: one a stage.
        micro_batches: of a step; a stage of 1F1B keeps as many as stages follow it, itself included, and
            never more than there are.
    """

    costs: tuple[float, ...]
    weights_bytes: tuple[int, ...]
    activations_bytes: tuple[int, ...]
    devices: tuple[Device, ...]
    micro_batches: int

    def stage_bytes(self, stage: int, first: int, end: int) -> int:
        """What the layers ``first`` to ``end`` (exclusive) need on a stage."""
        in_flight = min(self.micro_batches, len(self.devices) - stage)
        return sum(self.weights_bytes[first:end]) + in_flight * sum(self.activations_bytes[first:end])


def equal_counts(layers: int, stages: int) -> list[int]:
    """Where each stage ends when all have the same number of layers, the first ones one more."""
    return list(accumulate(layers // stages + (stage < layers % stages) for stage in range(stages)))


def filled_in_turn(layers: Layers) -> list[int]:
    """Where each stage ends when it takes layers until it has its share of the work, by its speed."""
    ends: list[int] = []
    speeds = sum(device.speed for device in layers.devices)
    done, wanted, layer = 0.0, 0.0, 0
    for stage, device in enumerate(layers.devices):
        wanted += sum(layers.costs) * device.speed / speeds
        last_end = len(layers.costs) - (len(layers.devices) - stage - 1)
        done, layer = done + layers.costs[layer], layer + 1
        while layer < last_end and done + layers.costs[layer] / 2 <= wanted:
            done, layer = done + layers.costs[layer], layer + 1
        ends.append(layer)
    ends[-1] = len(layers.costs)
    return ends


def best_partition(layers: Layers) -> list[int]:
    """Where each stage ends in the partition whose slowest stage is fastest; each has a layer or more.

    Optimal: ``best[s][i]``, the first i layers on the first s stages, is the least over k of
    ``max(best[s - 1][k], time of layers k to i on stage s)``, taken only where the stage's memory holds them.

    Raises:
        UsageError: no partition keeps the memory limits.
    """
    count, stages = len(layers.costs), len(layers.devices)
    sums = [list(accumulate(v, initial=0)) for v in (layers.weights_bytes, layers.activations_bytes)]
    work = list(accumulate(layers.costs, initial=0.0))
    infinite = float("inf")
    best = [0.0] + [infinite] * count
    cuts: list[list[int]] = []
    for stage, device in enumerate(layers.devices):
        in_flight = min(layers.micro_batches, stages - stage)
        after, cut = [infinite] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for first in range(end - 1, stage - 1, -1):
                seconds = (work[end] - work[first]) / device.speed
                held = sums[0][end] - sums[0][first] + in_flight * (sums[1][end] - sums[1][first])
                over = device.memory_bytes is not None and held > device.memory_bytes
                if over or seconds >= after[end]:
                    break  # a longer piece is slower and larger still
                if max(best[first], seconds) < after[end]:
                    after[end], cut[end] = max(best[first], seconds), first
        best = after
        cuts.append(cut)
    if best[count] == infinite:
        raise UsageError(_does_not_fit(layers))
    ends, end = [count], count
    for cut in reversed(cuts[1:]):
        end = cut[end]
        ends.append(end)
    return ends[::-1]


def stage_of_layers(ends: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer."""
    starts = [0, *ends[:-1]]
    return tuple(
        stage for stage, (first, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(first, end)
    )


def _does_not_fit(layers: Layers) -> str:
    needed = sum(layers.weights_bytes) + sum(layers.activations_bytes)
    limits = ", ".join(
        f"{d.name} {'no limit' if d.memory_bytes is None else format_bytes(d.memory_bytes)}"
        for d in layers.devices
    )
    return (
        f"no split of {len(layers.costs)} layers ({format_bytes(needed)}, activations of one micro-batch "
        f"counted) into {len(layers.devices)} stages keeps the memory of {limits}: more stages, fewer "
        "micro-batches in flight, or checkpointing"
    )
