"""Pools of real memory: blocks of it by any allocation policy, tensors in them, and who holds what."""

from __future__ import annotations

from memfit.pools.allocator import MemoryAllocator
from memfit.pools.compaction import Defragmentation
from memfit.pools.dynamic import DynamicAllocation
from memfit.pools.handles import MemoryHandle
from memfit.pools.holdings import Holder, OutOfPoolMemory
from memfit.pools.idle import IdleCacheRelease, PoolCache, TorchCudaCache
from memfit.pools.leaks import Collection, KeptTensor, collect
from memfit.pools.plans import StepPlan
from memfit.pools.pool import MemoryPool
from memfit.pools.served import ServedPlan, StepRecording
from memfit.pools.sites import Site
from memfit.pools.statistics import PoolStatistics

__all__ = [
    "Collection",
    "Defragmentation",
    "DynamicAllocation",
    "Holder",
    "IdleCacheRelease",
    "KeptTensor",
    "MemoryAllocator",
    "MemoryHandle",
    "MemoryPool",
    "OutOfPoolMemory",
    "PoolCache",
    "PoolStatistics",
    "ServedPlan",
    "Site",
    "StepPlan",
    "StepRecording",
    "TorchCudaCache",
    "collect",
]
