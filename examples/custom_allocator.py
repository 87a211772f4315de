"""A policy of one's own: write it, register it by name, compare it, wrap it.

python examples/custom_allocator.py
"""

from __future__ import annotations

import random

from memfit.allocators import (
    ALLOCATORS,
    AddressSpaceConfig,
    BaseAllocator,
    Block,
    CountedAllocator,
    LimitedAllocator,
    OutOfMemory,
    register_allocator,
)
from memfit.allocators.comparison import run_policy
from memfit.allocators.replay import Operation, Step


class TwoEndsAllocator(BaseAllocator):
    """Small blocks from the bottom, large ones from the top; freed room is used again for its own size."""

    def __init__(self, config):
        super().__init__(config)
        self.bottom, self.top = 0, config.total_bytes
        self.next_id = 0
        self.freed = {}  # size -> offsets

    def allocate(self, size):
        rounded = -(-size // self.config.alignment_bytes) * self.config.alignment_bytes
        if self.freed.get(rounded):
            offset = self.freed[rounded].pop()
        elif self.bottom + rounded > self.top:
            raise OutOfMemory(
                requested_bytes=size,
                reserved_bytes=self.config.total_bytes,
                limit_bytes=self.config.total_bytes,
                allocated_bytes=self.bottom + self.config.total_bytes - self.top,
            )
        elif rounded < 64 * 1024:
            offset = self.bottom
            self.bottom += rounded
        else:
            self.top -= rounded
            offset = self.top
        self.next_id += 1
        return Block(
            block_id=self.next_id,
            address=(1 << 44) + offset,
            size_bytes=rounded,
            requested_bytes=size,
            offset_bytes=offset,
        )

    def deallocate(self, block):
        self.freed.setdefault(block.size_bytes, []).append(block.offset_bytes)


def program(steps: int = 2_000) -> list[Operation]:
    """A made-up program that allocates and frees tensors of a few sizes."""
    generator = random.Random(0)
    operations: list[Operation] = []
    live: list[int] = []
    for number in range(steps):
        operations.append(Operation(Step.ALLOC, number, generator.choice([512, 4096, 65_536, 1 << 20])))
        live.append(number)
        if len(live) > 40:
            operations.append(Operation(Step.FREE, live.pop(generator.randrange(len(live)))))
    return operations


def main() -> None:
    register_allocator("two_ends", TwoEndsAllocator)
    config = AddressSpaceConfig(total_bytes=64 << 20)
    for name in ("two_ends", "first_fit", "buddy"):
        run = run_policy(program(), ALLOCATORS[name](config))
        print(
            f"{name:10} served {run.served}, failed {len(run.failed)}, peak {run.peak_allocated_bytes} bytes"
        )
    wrapped = CountedAllocator(LimitedAllocator(TwoEndsAllocator(config), limit_bytes=16 << 20))
    run_policy(program(), wrapped)
    print(f"with 16 MiB: {wrapped.counts().failures} requests refused")


if __name__ == "__main__":
    main()
