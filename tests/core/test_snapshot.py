"""Snapshots: sums over blocks, and blocks that do not tile their segment."""

from __future__ import annotations

import pytest

from memfit.core.snapshot import BlockState, Segment, Snapshot, SnapshotBlock

MIB = 1 << 20


def _segment(address: int, *blocks: tuple[int, BlockState]) -> Segment:
    """A segment of blocks given as size and state; tensors asked for a byte less than they got."""
    made, place = [], address
    for size, state in blocks:
        requested = size - 1 if state != "inactive" else 0
        made.append(SnapshotBlock(address=place, size_bytes=size, requested_bytes=requested, state=state))
        place += size
    return Segment(address=address, size_bytes=place - address, stream=0, pool="large", blocks=tuple(made))


def test_sums() -> None:
    used = _segment(1 << 44, (3 * MIB, "allocated"), (7 * MIB, "inactive"), (10 * MIB, "pending_free"))
    spare = _segment(1 << 45, (5 * MIB, "inactive"))
    snapshot = Snapshot(segments=(used, spare))
    assert snapshot.reserved_bytes == 25 * MIB
    assert snapshot.allocated_bytes == 3 * MIB
    assert snapshot.requested_bytes == 3 * MIB - 1
    assert snapshot.free_bytes == 12 * MIB
    assert snapshot.largest_free_bytes == 7 * MIB
    assert snapshot.releasable_bytes == 5 * MIB
    assert (used.active_bytes, used.free, spare.free) == (13 * MIB, False, True)
    assert len(list(snapshot.blocks())) == 4


def test_empty() -> None:
    empty = Snapshot(segments=())
    assert (empty.reserved_bytes, empty.largest_free_bytes, empty.releasable_bytes) == (0, 0, 0)


def test_blocks_must_tile_their_segment() -> None:
    block = SnapshotBlock(address=512, size_bytes=512, requested_bytes=1, state="allocated")
    gap = Segment(address=0, size_bytes=1024, stream=0, pool="small", blocks=(block,))
    short = Segment(address=512, size_bytes=1024, stream=0, pool="small", blocks=(block,))
    with pytest.raises(ValueError, match="segment 0x0: a block at 0x200, not 0x0"):
        Snapshot(segments=(gap,))
    with pytest.raises(ValueError, match="segment 0x200: blocks of 512 bytes in 1024"):
        Snapshot(segments=(short,))
