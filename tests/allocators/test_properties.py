"""Random programs through the caching allocator, looked over by a naive validator after every step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators.base import Block, OutOfMemory
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.chunks import FREE, UNMAPPED
from memfit.allocators.replay import segments_of

KIB, MIB = 1 << 10, 1 << 20
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:[1:8,16:2,>:1]",
    "garbage_collection_threshold:0.5",
    "large_segment_size_mb:24,max_split_size_mb:40",
)
sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB + 1),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 70 * MIB),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 1 << 16), st.integers(0, 2)),
        st.tuples(st.sampled_from(["sync", "empty"]), st.just(0), st.just(0)),
    ),
    max_size=80,
)


def run(program: list[tuple[str, int, int]], text: str) -> None:
    config = CachingConfig(total_bytes=256 * MIB, settings=text, memory_fraction=0.9, events="manual")
    allocator = CachingAllocator(config)
    live: list[Block] = []
    for what, number, stream in program:
        if what == "alloc":
            try:
                live.append(allocator.allocate(number, stream=stream))
            except OutOfMemory as failure:
                assert failure.requested_bytes == number
        elif what == "free" and live:
            allocator.deallocate(live.pop(number % len(live)))
        elif what == "record" and live:
            allocator.record_stream(live[number % len(live)], stream)
        elif what == "sync":
            allocator.synchronize()
        elif what == "empty":
            allocator.empty_cache()
        validate(allocator, live)
    for block in live:
        allocator.deallocate(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.device.used_bytes == 0
    assert segments_of(allocator) == ()
    stats = allocator.stats()
    for name in (
        "allocated_bytes",
        "reserved_bytes",
        "requested_bytes",
        "active_bytes",
        "inactive_split_bytes",
    ):
        current, peak, gained, freed = stats[name]["all"]
        assert (current, gained - freed) == (0, 0), name
        assert peak >= 0


def validate(allocator: CachingAllocator, live: list[Block]) -> None:
    """Which rule is broken, if any; deliberately naive."""
    for block in live:
        assert block.address % 512 == 0, "alignment"
        assert block.size_bytes >= block.requested_bytes > 0, "size"
    spans = sorted((block.address, block.address + block.size_bytes) for block in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "overlap"

    segments = segments_of(allocator)
    assert sum(segment.size_bytes for segment in segments) == allocator.reserved_bytes, "reserved"
    assert allocator.reserved_bytes == allocator.device.used_bytes <= allocator.device.total_bytes, "device"
    assert allocator.limit_bytes is None or allocator.reserved_bytes <= allocator.limit_bytes, "limit"
    for segment in segments:
        end = 0
        for block in segment.blocks:
            assert block.offset_bytes == end, "a gap in a segment"
            end += block.size_bytes
        assert end == segment.size_bytes, "segment size"
    held = sum(block.size_bytes for segment in segments for block in segment.blocks if block.state == "A")
    stats = allocator.stats()
    assert held == sum(block.size_bytes for block in live) == stats["allocated_bytes"]["all"][0], "allocated"
    assert stats["reserved_bytes"]["all"][0] >= held >= sum(block.requested_bytes for block in live), "order"
    no_free_neighbours(allocator)


def no_free_neighbours(allocator: CachingAllocator) -> None:
    previous = None
    for chunk in allocator.chunks():
        if previous is not None and chunk.prev is previous:
            assert not (chunk.state == previous.state and chunk.state in (FREE, UNMAPPED)), "not joined"
        previous = chunk
        if chunk.state == FREE:
            assert chunk in chunk.home.in_order(), "free, but not in its list"


@settings(max_examples=120, deadline=None)
@given(program=steps, text=st.sampled_from(SETTINGS))
def test_random_programs_break_no_rule(program: list[tuple[str, int, int]], text: str) -> None:
    run(program, text)
