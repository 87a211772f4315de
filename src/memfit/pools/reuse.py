"""Blocks that were just freed, kept by size: the next request of that size needs no search.

To the policy they are out. So whatever needs the policy's own view of what is free (another size that finds
no room, growth, trimming, defragmentation, statistics, plans) has them given back first.
"""

from __future__ import annotations

from memfit.allocators.caching import CachingAllocator
from memfit.pools.holdings import Holding
from memfit.pools.policies import Policy

LARGEST_BYTES = 1 << 20
"""Larger blocks are worth a search: writing them once takes far longer than finding a place for them."""
MOST_BYTES = 32 << 20
"""All that is kept at once, so that stretches that could be joined are not held apart for long."""


class FreedBlocks:
    """Stacks of freed blocks, one for each size that was asked of the policy. The arena's lock guards them.

    Args:
        on: whether to keep any.
    """

    __slots__ = ("_kept_bytes", "_on", "_stacks")

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._stacks: dict[int, list[Holding]] = {}
        self._kept_bytes = 0

    @staticmethod
    def serve(policy: Policy) -> bool:
        """Whether they may stand before a policy: not before one that keeps freed blocks itself, one that
        learns from all it is asked, or one that others have written and may watch."""
        return policy.kind.__module__.startswith("memfit.allocators.") and not issubclass(
            policy.kind, CachingAllocator
        )

    def keep(self, holding: Holding) -> bool:
        """Keep a block that is free now; False where the policy shall have it back."""
        size = holding.asked_bytes
        if (
            not self._on
            or size > LARGEST_BYTES
            or self._kept_bytes + size > MOST_BYTES
            or holding.chunk.fixed
        ):
            return False
        self._kept_bytes += size
        stack = self._stacks.get(size)
        if stack is None:
            self._stacks[size] = [holding]
        else:
            stack.append(holding)
        return True

    def take(self, asked_bytes: int) -> Holding | None:
        """The block of that size that was freed last, which the caches of the processor may still have."""
        stack = self._stacks.get(asked_bytes)
        if not stack:
            return None
        self._kept_bytes -= asked_bytes
        return stack.pop()

    def give_back(self) -> bool:
        """Let the policy have all of them; whether there were any."""
        if not self._stacks:
            return False
        for stack in self._stacks.values():
            for holding in stack:
                holding.chunk.give_back(holding.block)
        kept, self._kept_bytes = self._kept_bytes, 0
        self._stacks = {}
        return kept > 0

    def forget(self) -> None:
        """The pool is closed."""
        self._stacks = {}
        self._kept_bytes = 0
