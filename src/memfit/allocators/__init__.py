"""Allocation policies over a made-up address space, and the replay of traces through them. No torch."""

from __future__ import annotations

from memfit.allocators.adaptors import CountedAllocator, LimitedAllocator, LoggedAllocator
from memfit.allocators.address_space import AddressSpaceConfig
from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.bitmap import BitmapAllocator
from memfit.allocators.buddy import BuddyAllocator
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.fibonacci_buddy import FibonacciBuddyAllocator
from memfit.allocators.fibonacci_heap import FibonacciHeapFit
from memfit.allocators.fits import BestFit, FirstFit, NextFit, WorstFit
from memfit.allocators.indexed import IndexedFit
from memfit.allocators.lifetimes import Lifetimes, lifetimes_of
from memfit.allocators.packing import Packing, pack
from memfit.allocators.replay import ReplayResult, replay
from memfit.allocators.segregated import SegregatedFit
from memfit.allocators.settings import CachingSettings, parse_settings
from memfit.allocators.slab import SlabAllocator
from memfit.allocators.tlsf import TwoLevelSegregatedFit
from memfit.core.errors import UsageError

ALLOCATORS: dict[str, type[BaseAllocator]] = {
    "caching": CachingAllocator,
    "first_fit": FirstFit,
    "next_fit": NextFit,
    "best_fit": BestFit,
    "worst_fit": WorstFit,
    "indexed_fit": IndexedFit,
    "fibonacci_heap": FibonacciHeapFit,
    "segregated_fit": SegregatedFit,
    "tlsf": TwoLevelSegregatedFit,
    "buddy": BuddyAllocator,
    "fibonacci_buddy": FibonacciBuddyAllocator,
    "bitmap": BitmapAllocator,
    "slab": SlabAllocator,
}
"""Every policy by name. All but ``caching`` take an `AddressSpaceConfig`; users add theirs with
`register_allocator`."""


def register_allocator(name: str, kind: type[BaseAllocator]) -> None:
    """Make a policy of yours known by name, wherever a policy's name is asked for in this process.

    Raises:
        UsageError: it is no subclass of `BaseAllocator`, or the name is another policy's.
    """
    if not (isinstance(kind, type) and issubclass(kind, BaseAllocator)):
        raise UsageError(f"register_allocator({name!r}): {kind!r} is not a subclass of BaseAllocator")
    if ALLOCATORS.get(name, kind) is not kind:
        raise UsageError(
            f"register_allocator({name!r}): the name is {ALLOCATORS[name].__qualname__}'s; choose another"
        )
    ALLOCATORS[name] = kind


__all__ = [
    "ALLOCATORS",
    "AddressSpaceConfig",
    "BaseAllocator",
    "Block",
    "CachingAllocator",
    "CachingConfig",
    "CachingSettings",
    "CountedAllocator",
    "Lifetimes",
    "LimitedAllocator",
    "LoggedAllocator",
    "OutOfMemory",
    "Packing",
    "ReplayResult",
    "lifetimes_of",
    "pack",
    "parse_settings",
    "register_allocator",
    "replay",
]
