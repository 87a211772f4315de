"""The settings string: PyTorch 2.14's verdicts (by its own parser), reasons, warnings."""

from __future__ import annotations

import pytest

from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.settings import CachingSettings, parse_settings, round_size, segment_bytes
from memfit.core.errors import UsageError

MIB = 1 << 20

ACCEPTED = [
    "",
    "max_split_size_mb:128",
    "max_split_size_mb:20",
    "max_split_size_mb:+128",
    "max_split_size_mb:512MB",
    "max_split_size_mb:-1",
    "max_split_size_mb:128,",
    "max_split_size_mb:128:",
    " expandable_segments : True ",
    "garbage_collection_threshold:0.8,max_split_size_mb:128",
    "garbage_collection_threshold:.5",
    "garbage_collection_threshold:0.5x",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:1,>:4,512:2]",
    "roundup_power2_divisions:[256:0]",
    "roundup_power2_divisions:[256:1,]",
    "roundup_power2_divisions:[131072:4]",
    "roundup_power2_divisions:[]",
    "max_split_size_mb:500,expandable_segments:True",
    "backend:native",
    "backend:cudaMallocAsync",
    "backend:cudaMallocAsync,max_split_size_mb:128",
    "per_process_memory_fraction:0.5",
    "per_process_memory_fraction:0",
    "throw_on_cudamalloc_oom:True",
    "large_segment_size_mb:33",
    "release_lock_on_cudamalloc:True",
    "graph_capture_record_stream_reuse:True",
    "pinned_use_cuda_host_register:True",
    "pinned_use_background_threads:True",
    "pinned_num_register_threads:8",
    "pinned_reserve_segment_size_mb:10",
    "pinned_max_cached_size_mb:5",
]
REFUSED = [
    ("max_split_size_mb:10", "at least 20"),
    ("max_split_size_mb=128", "write max_split_size_mb:128"),
    ("max_split_size_mb:0.5GB", "at least 20"),
    ("max_split_size_mb:1e3", "at least 20"),
    ("max_split_size_mb:", "has no value"),
    ("max_split_size_mb:abc", "whole number"),
    ("max_split_size_mb:[128]", "whole number"),
    ("max_split_size_mb:99999999999999999999", "too large"),
    ("max_split_size_mb:30,large_segment_size_mb:64", "at least 64"),
    ("large_segment_size_mb:64,max_split_size_mb:30", "at least 64"),
    ("large_segment_size_mb:5", "above 10"),
    ("max_non_split_rounding_mb:10", "at least 20"),
    ("expandable_segments:true", "write expandable_segments:True"),
    ("expandable_segments:TRUE", "write expandable_segments:True"),
    ("expandable_segments:1", "write expandable_segments:True"),
    ("expandable_segments=True", "write expandable_segments:True"),
    ("expandable_segments", "has no value"),
    ("garbage_collection_threshold:0.8 max_split_size_mb:128", "one comma"),
    ("garbage_collection_threshold:1.5", "between 0 and 1"),
    ("garbage_collection_threshold:1", "between 0 and 1"),
    ("garbage_collection_threshold:0", "between 0 and 1"),
    ("garbage_collection_threshold:0,8", "between 0 and 1"),
    ("garbage_collection_threshold:80%", "between 0 and 1"),
    ("garbage_collection_threshold:nan", "a number"),
    ("roundup_power2_divisions:3", "power of two"),
    ("roundup_power2_divisions:0", "power of two"),
    ("roundup_power2_divisions:[3:1]", "power of two"),
    ("roundup_power2_divisions:[256:3]", "power of two"),
    ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8", "has no value"),
    ("max_split_size_mb:128,,expandable_segments:True", "empty entry"),
    (",max_split_size_mb:128", "KEY:VALUE"),
    ("max_split_size_mb:128;expandable_segments:True", "one comma"),
    ("backend:cudamallocasync", "cudaMallocAsync"),
    ("cudart", "KEY:VALUE"),
    ("C:\\Users\\me\\conf", "unknown key"),
    ('"expandable_segments:True"', "quotation marks"),
    ("'max_split_size_mb:128'", "quotation marks"),
    ("expandable_segmets:True", "did you mean expandable_segments?"),
    ("max_split_size:128", "did you mean max_split_size_mb?"),
    ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "leave it out"),
    ("throw_on_cudamalloc_oom:false", "throw_on_cudamalloc_oom:False"),
    ("per_process_memory_fraction:1.5", "between 0 and 1"),
    ("pinned_num_register_threads:256", "up to 128"),
    ("pinned_num_register_threads:3", "power of two"),
    ("pinned_reserve_segment_size_mb:0", "above 0"),
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepts_what_pytorch_accepts(text: str) -> None:
    assert isinstance(parse_settings(text).settings, CachingSettings)


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_refuses_what_pytorch_refuses_and_says_why(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_settings(text)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("max_split_size_mb:512MB", "'MB' is ignored"),
        ("max_split_size_mb:-1", "no limit at all"),
        ("max_split_size_mb:500,expandable_segments:True", "against each other"),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "ignores"),
    ],
)
def test_warns_of_what_pytorch_misreads(text: str, warning: str) -> None:
    assert warning in " ".join(parse_settings(text).warnings)


def test_good_settings_have_no_warnings() -> None:
    parsed = parse_settings("max_split_size_mb:128,garbage_collection_threshold:0.6")
    assert parsed.warnings == ()
    assert parsed.settings.max_split_size_bytes == 128 * MIB
    assert parsed.settings.garbage_collection_threshold == 0.6


def test_roundup_list_holds_interval_by_interval() -> None:
    # What the compiled allocator gave for "[256:1,512:2,1024:4,>:8]" and "[4:4,16:2,>:1]".
    settings = parse_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").settings
    assert round_size(260 * MIB, settings) == 260 * MIB
    assert round_size(515 * MIB, settings) == 768 * MIB
    assert round_size(1030 * MIB + 1, settings) == 1280 * MIB
    assert round_size(2100 * MIB, settings) == 2304 * MIB
    settings = parse_settings("roundup_power2_divisions:[4:4,16:2,>:1]").settings
    assert round_size(2100 * 1024, settings) == 2560 * 1024
    assert round_size(5 * MIB + 1, settings) == 6 * MIB
    assert round_size(9 * MIB + 1, settings) == 9 * MIB + 512
    assert round_size(17 * MIB + 1, settings) == 24 * MIB
    assert round_size(33 * MIB + 1, settings) == 33 * MIB + 512


def test_segment_sizes_at_their_borders() -> None:
    settings = CachingSettings()
    assert segment_bytes(MIB, settings) == 2 * MIB
    assert segment_bytes(MIB + 512, settings) == 20 * MIB
    assert segment_bytes(10 * MIB - 512, settings) == 20 * MIB
    assert segment_bytes(10 * MIB, settings) == 10 * MIB
    assert segment_bytes(10 * MIB + 512, settings) == 12 * MIB
    assert segment_bytes(2 * MIB, parse_settings("large_segment_size_mb:33").settings) == 33 * MIB


def test_the_drivers_own_allocator_is_not_modelled() -> None:
    with pytest.raises(UsageError, match="only native"):
        CachingAllocator(CachingConfig(settings="backend:cudaMallocAsync"))
