"""An allocation policy of your own, known by name wherever memfit asks for one.

python examples/manager_with_own_policy.py
"""

from __future__ import annotations

from typing import Any

import torch

from memfit import BaseAllocator, GPUMemoryManager
from memfit.allocators import Block, OutOfMemory, register_allocator


class StackAllocator(BaseAllocator):
    """Blocks one after the other; a place is free again once all above it are, as on a stack."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks: list[Block] = []
        self.freed: set[int] = set()
        self.made = 0

    def allocate(self, size: int) -> Block:  # type: ignore[override]
        start = self.blocks[-1].offset_bytes + self.blocks[-1].size_bytes if self.blocks else 0
        if start + size > self.config.total_bytes:
            raise OutOfMemory(
                requested_bytes=size,
                reserved_bytes=self.config.total_bytes,
                limit_bytes=self.config.total_bytes,
                allocated_bytes=start,
            )
        block = Block(
            block_id=self.made, address=start, offset_bytes=start, size_bytes=size, requested_bytes=size
        )
        self.made += 1
        self.blocks.append(block)
        return block

    def deallocate(self, block: Block) -> None:
        self.freed.add(block.block_id)
        while self.blocks and self.blocks[-1].block_id in self.freed:
            self.freed.remove(self.blocks.pop().block_id)


register_allocator("stack", StackAllocator)


def main() -> None:
    """A manager that places its blocks by the new policy."""
    with GPUMemoryManager(total_memory="8MiB", allocation_policy="stack", device="cpu") as manager:
        first, second = manager.allocate("1MiB"), manager.allocate("2MiB")
        second.tensor(torch.float32).fill_(1.0)
        manager.deallocate(first)  # below the second: its place is free when that is
        manager.deallocate(second)
        print(manager.allocate("8MiB"))
        print(manager.statistics().policy)


if __name__ == "__main__":
    main()
