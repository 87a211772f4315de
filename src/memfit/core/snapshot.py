"""A memory snapshot as values: what the caching allocator holds at one moment, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.core.trace import Trace

BlockState = Literal["allocated", "pending_free", "inactive"]
"""In use by a tensor; freed but still used on another stream; free in the cache."""


@dataclass(frozen=True, kw_only=True)
class SnapshotBlock:
    """One block of a segment.

    Args:
        address: where it begins on the device.
        size_bytes: what it takes of its segment.
        requested_bytes: what was asked for; 0 where it is inactive.
        state: see `BlockState`.
        where: the line that asked for it (``"train.py:12 main"``), empty where unknown.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    state: BlockState
    where: str = ""

    @property
    def active(self) -> bool:
        """Whether the allocator may not give it out."""
        return self.state != "inactive"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One range that the allocator took from the device.

    Args:
        address: where it begins.
        size_bytes: its length, that of its blocks together.
        stream: number of the stream whose blocks it serves.
        pool: ``"small"`` (requests up to 1 MiB) or ``"large"``.
        expandable: whether it is a mapped stretch of an expandable segment.
        blocks: in order of address, without gaps.
    """

    address: int
    size_bytes: int
    stream: int
    pool: Literal["small", "large"]
    blocks: tuple[SnapshotBlock, ...]
    expandable: bool = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that tensors use."""
        return sum(block.size_bytes for block in self.blocks if block.state == "allocated")

    @property
    def active_bytes(self) -> int:
        """Bytes of the blocks that cannot be given out."""
        return sum(block.size_bytes for block in self.blocks if block.active)

    @property
    def free(self) -> bool:
        """Whether nothing in it is active, so that it could go back to the device."""
        return not any(block.active for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that an allocator holds on one device.

    Args:
        segments: in order of address.
        settings: the allocator's settings, as it names them.
        trace: the events that led here, as far as they were recorded.

    Examples:
        >>> block = SnapshotBlock(address=0, size_bytes=512, requested_bytes=100, state="allocated")
        >>> rest = SnapshotBlock(address=512, size_bytes=2096640, requested_bytes=0, state="inactive")
        >>> held = Segment(address=0, size_bytes=2097152, stream=0, pool="small", blocks=(block, rest))
        >>> snapshot = Snapshot(segments=(held,))
        >>> snapshot.reserved_bytes, snapshot.allocated_bytes, snapshot.requested_bytes
        (2097152, 512, 100)
    """

    segments: tuple[Segment, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None

    def __post_init__(self) -> None:
        for segment in self.segments:
            _check_blocks(segment)

    def blocks(self) -> Iterator[SnapshotBlock]:
        """All blocks, segment by segment."""
        return (block for segment in self.segments for block in segment.blocks)

    @property
    def reserved_bytes(self) -> int:
        """What the allocator took from the device."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """What tensors use, as blocks."""
        return sum(segment.allocated_bytes for segment in self.segments)

    @property
    def requested_bytes(self) -> int:
        """What tensors asked for."""
        return sum(block.requested_bytes for block in self.blocks() if block.state == "allocated")

    @property
    def free_bytes(self) -> int:
        """What lies free in the cache."""
        return sum(block.size_bytes for block in self.blocks() if not block.active)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that the cache could serve without taking more from the device."""
        return max((block.size_bytes for block in self.blocks() if not block.active), default=0)

    @property
    def releasable_bytes(self) -> int:
        """What ``empty_cache()`` would give back: segments in which nothing is active."""
        return sum(segment.size_bytes for segment in self.segments if segment.free)


def _check_blocks(segment: Segment) -> None:
    """Blocks must tile their segment: a reader that lost one is told where.

    Raises:
        ValueError: a gap, an overlap, or a wrong total.
    """
    expected = segment.address
    for block in segment.blocks:
        if block.address != expected:
            raise ValueError(
                f"segment {segment.address:#x}: a block at {block.address:#x}, not {expected:#x}"
            )
        expected += block.size_bytes
    if expected != segment.address + segment.size_bytes:
        total = expected - segment.address
        raise ValueError(f"segment {segment.address:#x}: blocks of {total} bytes in {segment.size_bytes}")
