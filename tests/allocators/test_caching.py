"""The caching allocator's rules one by one, each with what the compiled allocator was seen to do."""

from __future__ import annotations

import pytest

from memfit.allocators import ALLOCATORS, Block, CachingAllocator, CachingConfig, OutOfMemory
from memfit.core.errors import UsageError

MIB = 1 << 20


def allocator(total_mib: int = 80 << 10, **settings: object) -> CachingAllocator:
    return CachingAllocator(CachingConfig(total_bytes=total_mib * MIB, **settings))  # type: ignore[arg-type]


def where(block: Block) -> tuple[int, int]:
    return block.region, block.offset_bytes


def test_table_names_the_policy() -> None:
    assert ALLOCATORS["caching"] is CachingAllocator
    assert ALLOCATORS["caching"]().stats()["reserved_bytes"]["all"] == [0, 0, 0, 0]


def test_empty_request_holds_nothing() -> None:
    it = allocator()
    block = it.allocate(0)
    assert (block.address, block.size_bytes, it.reserved_bytes) == (0, 0, 0)
    it.deallocate(block)


def test_freeing_twice_is_an_error_that_names_the_block() -> None:
    it = allocator()
    block = it.allocate(100)
    it.deallocate(block)
    with pytest.raises(UsageError, match=r"block 0 .*freed twice"):
        it.deallocate(block)
    with pytest.raises(UsageError):
        allocator().deallocate(block)


def test_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="negative"):
        allocator().allocate(-1)


def test_other_streams_blocks_are_not_taken() -> None:
    it = allocator()
    it.deallocate(it.allocate(30 * MIB, stream=1))
    assert it.allocate(30 * MIB, stream=0).region == 1
    assert it.allocate(30 * MIB, stream=1).region == 0


def test_block_in_use_by_another_stream_waits_for_it() -> None:
    it = allocator(events="manual")
    block = it.allocate(30 * MIB)
    it.record_stream(block, 2)
    it.deallocate(block)
    assert it.stats()["active_bytes"]["all"][0] == 30 * MIB
    assert it.stats()["allocated_bytes"]["all"][0] == 0
    assert it.allocate(30 * MIB).region == 1
    it.synchronize()
    assert it.allocate(30 * MIB).region == 0


def test_use_on_the_own_stream_does_not_wait() -> None:
    it = allocator(events="manual")
    block = it.allocate(30 * MIB, stream=2)
    it.record_stream(block, 2)
    it.deallocate(block)
    assert it.allocate(30 * MIB, stream=2).region == 0


@pytest.mark.parametrize(("settings", "region"), [("", 0), ("max_split_size_mb:40", 1)])
def test_unsplittable_block_serves_no_request_far_below_it(settings: str, region: int) -> None:
    it = allocator(settings=settings)
    it.deallocate(it.allocate(100 * MIB))
    assert it.allocate(45 * MIB).region == region


def test_unsplit_rounding_follows_its_setting() -> None:
    it = allocator(settings="max_split_size_mb:40,max_non_split_rounding_mb:60")
    it.deallocate(it.allocate(100 * MIB))
    block = it.allocate(45 * MIB)
    assert (block.region, block.size_bytes) == (0, 100 * MIB)


def test_out_of_memory_counts_a_retry_and_says_what_was_there() -> None:
    it = allocator(100)
    held = it.allocate(60 * MIB)
    it.deallocate(it.allocate(30 * MIB))
    with pytest.raises(OutOfMemory) as failure:
        it.allocate(50 * MIB)
    assert (failure.value.requested_bytes, failure.value.reserved_bytes) == (50 * MIB, 60 * MIB)
    stats = it.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)
    it.deallocate(held)
    assert it.allocate(50 * MIB).region == 0


def test_early_rejection_leaves_the_cache() -> None:
    it = allocator(100, settings="throw_on_cudamalloc_oom:True")
    it.deallocate(it.allocate(30 * MIB))
    with pytest.raises(OutOfMemory):
        it.allocate(80 * MIB)
    stats = it.stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"]) == (1, 0, 0)
    assert it.reserved_bytes == 30 * MIB


def test_early_rejection_goes_by_the_device_and_comes_after_the_limit() -> None:
    config = CachingConfig(
        total_bytes=100 * MIB, settings="throw_on_cudamalloc_oom:True", memory_fraction=0.5
    )
    it = CachingAllocator(config)
    it.deallocate(it.allocate(40 * MIB))
    with pytest.raises(OutOfMemory):
        it.allocate(90 * MIB)
    stats = it.stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"]) == (0, 1, 1)


def test_fraction_in_the_settings_limits_and_lets_garbage_be_collected() -> None:
    it = allocator(200, settings="per_process_memory_fraction:0.9,garbage_collection_threshold:0.2")
    it.deallocate(it.allocate(50 * MIB))
    it.allocate(60 * MIB)
    assert it.allocate(25 * MIB).region == 2
    assert it.reserved_bytes == 86 * MIB


def test_a_fraction_of_one_is_no_limit_whatever_the_settings_say() -> None:
    text = "per_process_memory_fraction:0.5,garbage_collection_threshold:0.2"
    it = CachingAllocator(CachingConfig(total_bytes=200 * MIB, settings=text, memory_fraction=1.0))
    it.deallocate(it.allocate(120 * MIB))
    it.allocate(60 * MIB)
    assert it.limit_bytes is None
    assert it.reserved_bytes == 120 * MIB


def test_garbage_is_not_collected_without_a_limit() -> None:
    it = allocator(200, settings="garbage_collection_threshold:0.2")
    it.deallocate(it.allocate(50 * MIB))
    it.allocate(60 * MIB)
    assert it.allocate(25 * MIB).region == 0


def test_expandable_page_follows_the_large_segment_size() -> None:
    it = allocator(settings="large_segment_size_mb:40,expandable_segments:True")
    it.allocate(2 * MIB)
    assert where(it.allocate(45 * MIB)) == (0, 2 * MIB)
    assert it.reserved_bytes == 80 * MIB


def test_reset_peaks_starts_from_now() -> None:
    it = allocator()
    it.deallocate(it.allocate(50 * MIB))
    it.allocate(10 * MIB)
    it.stats_book.reset_peaks()
    assert it.stats()["allocated_bytes"]["all"][:2] == [10 * MIB, 10 * MIB]


def test_older_torch_breaks_ties_by_address() -> None:
    # Addresses here only go up, so both orders agree; that the setting runs is all that can be seen.
    for tie_break in ("creation", "address"):
        it = allocator(tie_break=tie_break)
        first, second = it.allocate(12 * MIB), it.allocate(12 * MIB)
        it.deallocate(second)
        it.deallocate(first)
        assert it.allocate(12 * MIB).region == 0
