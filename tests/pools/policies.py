"""An allocation policy as a user would write it: the naive first fit that tests compare with and register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.allocators import BaseAllocator, Block, OutOfMemory


class NaiveFirstFit(BaseAllocator):
    """The lowest gap, found by looking at every block."""

    def __init__(self, config: Any) -> None:
        self.total_bytes = config.total_bytes
        self.out: list[Block] = []
        self.made = 0

    def allocate(self, size: int) -> Block:  # type: ignore[override]
        start = 0
        for block in self.out:
            if block.offset_bytes - start >= size:
                break
            start = block.offset_bytes + block.size_bytes
        used = sum(block.size_bytes for block in self.out)
        if start + size > self.total_bytes:
            raise OutOfMemory(
                requested_bytes=size,
                reserved_bytes=self.total_bytes,
                limit_bytes=self.total_bytes,
                allocated_bytes=used,
            )
        block = Block(
            block_id=self.made,
            address=start,
            size_bytes=size,
            requested_bytes=size,
            stream=0,
            region=0,
            offset_bytes=start,
        )
        self.made += 1
        self.out.append(block)
        self.out.sort(key=lambda block: block.offset_bytes)
        return block

    def deallocate(self, block: Block) -> None:
        self.out.remove(block)

    def stats(self) -> Mapping[str, Any]:
        used = sum(block.size_bytes for block in self.out)
        return {
            "allocated_bytes": {"all": [used, used, used, 0]},
            "reserved_bytes": {"all": [self.total_bytes, self.total_bytes, self.total_bytes, 0]},
            "requested_bytes": {"all": [used, used, used, 0]},
        }
