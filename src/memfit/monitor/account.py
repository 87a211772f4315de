"""The account of one device now: parts that add up to what the device has, or to what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.monitor.samples import AllocatorSample, DeviceSample, ProcessSample

LABELS = {
    "rounding": "Rounding",
    "allocated": "Tensors",
    "waiting": "Waiting for streams",
    "cached": "Cached by PyTorch",
    "stranded": "Stranded in segments",
    "context": "Contexts, libraries",
    "others": "Other processes",
    "outside": "Outside PyTorch",
    "driver": "Driver",
    "free": "Free",
}
"""Cached: reserved by PyTorch and free to its tensors. Stranded: the same, but pieces of segments in use,
which cannot be given back. Outside: contexts, libraries, other processes, if the driver tells no more."""


@dataclass(frozen=True, kw_only=True)
class AccountPart:
    """One part: its key (of `LABELS`, or a category of tensors) and bytes."""

    key: str
    label: str
    held_bytes: int


def account(
    device: DeviceSample, allocators: Sequence[AllocatorSample], processes: Sequence[ProcessSample]
) -> list[AccountPart]:
    """The parts of one device's memory, from the tensors to what is free.

    Args:
        device: the device.
        allocators: those of the processes that are watched, on this device and alive.
        processes: all that the driver shows on this device; of the watched ones, by number.
    """
    parts: dict[str, int] = {}
    for allocator in allocators:
        for key, held in _of_allocator(allocator).items():
            parts[key] = parts.get(key, 0) + held
    reserved = sum(allocator.reserved_bytes or 0 for allocator in allocators)
    if device.used_bytes is not None:
        parts |= _beyond(device.used_bytes - reserved, reserved, allocators, processes)
    if device.reserved_bytes:
        parts["driver"] = device.reserved_bytes
    if device.free_bytes is not None:
        parts["free"] = device.free_bytes
    return [
        AccountPart(key=key, label=LABELS.get(key, key.replace("_", " ").capitalize()), held_bytes=held)
        for key, held in parts.items()
        if held > 0
    ]


def _of_allocator(one: AllocatorSample) -> dict[str, int]:
    """What one allocator has reserved, in parts that add up to it."""
    reserved, allocated = one.reserved_bytes or 0, one.allocated_bytes or 0
    active = max(allocated, one.active_bytes or 0)
    named = dict(one.by_category)
    tensors = {**named, "rounding": allocated - sum(named.values())} if named else {"allocated": allocated}
    cached = max(0, reserved - active)
    stranded = min(cached, one.inactive_split_bytes or 0)
    return {**tensors, "waiting": active - allocated, "cached": cached - stranded, "stranded": stranded}


def _beyond(
    beyond: int, reserved: int, allocators: Sequence[AllocatorSample], processes: Sequence[ProcessSample]
) -> dict[str, int]:
    """What is used beyond the watched allocators: by process where the driver tells it, else in one part."""
    held = {process.pid: process.used_bytes for process in processes}
    mine = [held.get(allocator.pid) for allocator in allocators]
    if allocators and all(used is not None for used in mine):
        context = max(0, min(beyond, sum(used for used in mine if used is not None) - reserved))
        return {"context": context, "others": beyond - context}
    return {"others" if not allocators else "outside": beyond}
