"""A caching allocator that starts from a state goes on exactly as the one that got there by itself."""

from __future__ import annotations

import random

import pytest

from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.chunks import Chunk
from memfit.allocators.replay import SegmentLayout, segments_of
from memfit.allocators.restoring import restore
from memfit.core.errors import UsageError
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock

MIB = 1 << 20
SIZES = (700, 4096, 300_000, MIB, 2 * MIB, 7 * MIB, 12 * MIB + 5, 25 * MIB)


def snapshot_of(allocator: CachingAllocator) -> Snapshot:
    """What ``torch.cuda.memory_snapshot`` would say."""
    return Snapshot(segments=tuple(_segment(allocator, layout) for layout in segments_of(allocator)))


def _segment(allocator: CachingAllocator, layout: SegmentLayout) -> Segment:
    address = allocator.regions[layout.region].address + layout.offset_bytes
    return Segment(
        address=address,
        size_bytes=layout.size_bytes,
        stream=layout.stream,
        pool="small" if layout.pool == "small" else "large",
        expandable=layout.expandable,
        blocks=tuple(
            SnapshotBlock(
                address=address + block.offset_bytes,
                size_bytes=block.size_bytes,
                requested_bytes=block.requested_bytes if block.state == "A" else 0,
                state="allocated" if block.state == "A" else "inactive",
            )
            for block in layout.blocks
        ),
    )


def run(
    allocator: CachingAllocator, live: list[Chunk], dice: random.Random, count: int
) -> list[tuple[int, int]]:
    """Random work; the place and size of each block that it allocates."""
    places = []
    for _ in range(count):
        if live and dice.random() < 0.48:
            allocator.free(live.pop(dice.randrange(len(live))))
        else:
            chunk = allocator.malloc(
                int(dice.choice(SIZES) * dice.uniform(0.5, 1.0)), dice.choice((0, 0, 0, 1))
            )
            live.append(chunk)
            places.append((chunk.address, chunk.size))
        if dice.random() < 0.01:
            allocator.empty_cache()
    return places


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:20", "roundup_power2_divisions:4"])
@pytest.mark.parametrize("tie_break", ["creation", "address"])
@pytest.mark.parametrize("seed", range(4))
def test_goes_on_exactly(settings: str, tie_break: str, seed: int) -> None:
    config = CachingConfig(total_bytes=2 << 30, settings=settings, tie_break=tie_break)  # type: ignore[arg-type]
    first, live = CachingAllocator(config), []
    run(first, live, random.Random(seed), 300)
    second = CachingAllocator(config)
    in_use = restore(second, snapshot_of(first))
    assert sorted(in_use) == sorted(chunk.address for chunk in live)
    assert second.reserved_bytes == first.reserved_bytes == second.device.used_bytes

    again = [in_use[chunk.address] for chunk in live]
    dice = random.Random(seed + 100)
    state = dice.getstate()
    expected = run(first, live, dice, 600)
    dice.setstate(state)
    assert run(second, again, dice, 600) == expected
    for name in ("allocated_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes", "segment"):
        assert second.stats()[name]["all"][0] == first.stats()[name]["all"][0], name
    assert snapshot_of(second) == snapshot_of(first)


@pytest.mark.parametrize("seed", range(6))
def test_expandable_segments_too(seed: int) -> None:
    config = CachingConfig(total_bytes=2 << 30, settings="expandable_segments:True")
    first, live = CachingAllocator(config), []
    run(first, live, random.Random(seed), 300)
    second = CachingAllocator(config)
    in_use = restore(second, snapshot_of(first))
    assert second.reserved_bytes == first.reserved_bytes
    sizes = [chunk.size for chunk in second.chunks() if chunk.state != 3]
    assert sum(sizes) == second.reserved_bytes
    assert {chunk.address: chunk.size for chunk in live} == {at: chunk.size for at, chunk in in_use.items()}
    again = list(in_use.values())
    run(second, again, random.Random(seed), 300)
    for chunk in again:
        second.free(chunk)
    second.empty_cache()
    assert second.reserved_bytes == second.device.used_bytes == 0


def test_an_allocator_that_is_in_use_is_refused() -> None:
    allocator = CachingAllocator()
    snapshot = Snapshot(segments=())
    allocator.malloc(5)
    with pytest.raises(UsageError, match="has not been used"):
        restore(allocator, snapshot)


def test_a_device_that_is_too_small_is_refused() -> None:
    first = CachingAllocator(CachingConfig(total_bytes=1 << 30))
    first.malloc(100 * MIB)
    with pytest.raises(UsageError, match="holds 104857600 bytes, and the device has 52428800"):
        restore(CachingAllocator(CachingConfig(total_bytes=50 * MIB)), snapshot_of(first))
