"""Allocation policies over a made-up address space, and the replay of traces through them. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.allocators.base import BaseAllocator, Block, OutOfMemory
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.replay import ReplayResult, replay
from memfit.allocators.settings import CachingSettings, parse_settings

ALLOCATORS: Mapping[str, type[BaseAllocator]] = {
    "caching": CachingAllocator,
}
"""Every policy by name."""

__all__ = [
    "ALLOCATORS",
    "BaseAllocator",
    "Block",
    "CachingAllocator",
    "CachingConfig",
    "CachingSettings",
    "OutOfMemory",
    "ReplayResult",
    "parse_settings",
    "replay",
]
