"""Pools on the CPU under every policy that can place blocks in a piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memfit.allocators import ALLOCATORS
from memfit.pools import DynamicAllocation, MemoryPool

from .policies import NaiveFirstFit

POLICIES: list[Any] = [*ALLOCATORS, NaiveFirstFit, DynamicAllocation]
SMALL: list[Any] = [policy for policy in POLICIES if policy != "caching"]
"""Those that serve a pool of a few MiB; PyTorch's takes 20 MiB for any block over 1 MiB."""


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else str(policy.__name__)


@pytest.fixture(params=POLICIES, ids=_name)
def policy(request: pytest.FixtureRequest) -> Any:
    """Each policy in turn."""
    return request.param


@pytest.fixture(params=SMALL, ids=_name)
def small_policy(request: pytest.FixtureRequest) -> Any:
    """Each policy that serves a pool of a few MiB."""
    return request.param


@pytest.fixture
def make_pool() -> Iterator[Callable[..., MemoryPool]]:
    """A pool on the CPU, first fit unless another policy is named; closed after the test."""
    made: list[MemoryPool] = []

    def make(pool_size: str | int = "1MiB", **settings: Any) -> MemoryPool:
        pool = MemoryPool(pool_size, **{"device": "cpu", "allocation_policy": NaiveFirstFit, **settings})
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()
