"""The caching allocator against what PyTorch's own did: placements, counters, final segments."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.allocators.caching import CachingAllocator
from memfit.allocators.replay import ReplayResult, config_for, parse_operations, replay_operations

GOLDEN = Path(__file__).parent.parent / "data" / "golden_allocator"
TRACES = ("mixed", "small", "large", "streams", "records", "pressure", "oom")
SETTINGS = ("default", "expandable", "maxsplit128", "roundup4", "gc06")


def golden(name: str) -> str:
    return gzip.decompress((GOLDEN / f"{name}.gz").read_bytes()).decode()


def as_oracle_prints(result: ReplayResult) -> dict[str, Any]:
    return {
        "placements": result.placements.ravel().tolist(),
        "reserved": result.reserved.tolist(),
        "ooms": list(result.ooms),
        "stats": result.stats,
        "segments": [
            {
                "range": segment.region,
                "offset": segment.offset_bytes,
                "size": segment.size_bytes,
                "pool": segment.pool,
                **({"private_pool": segment.private_pool} if segment.private_pool else {}),
                "stream": segment.stream,
                "expandable": segment.expandable,
                "allocated": segment.allocated_bytes,
                "active": segment.active_bytes,
                "requested": segment.requested_bytes,
                "blocks": [
                    [block.offset_bytes, block.size_bytes, block.requested_bytes, block.state]
                    for block in segment.blocks
                ],
            }
            for segment in result.segments
        ],
    }


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("trace", TRACES)
def test_equals_pytorch(trace: str, settings: str) -> None:
    truth = json.loads(golden(f"{trace}.{settings}.json"))
    listed = parse_operations(golden(f"{trace}.jsonl").splitlines())
    allocator = CachingAllocator(config_for(listed, settings=truth["conf"]))

    result = replay_operations(listed.operations, allocator)

    for name, value in as_oracle_prints(result).items():
        assert value == truth[name], name
    assert allocator.device.used_bytes == truth["device"]["used"]
    assert allocator.device.peak_used_bytes == truth["device"]["peak_used"]
    assert result.peak_reserved_bytes == truth["stats"]["reserved_bytes"]["all"][1]
    assert result.peak_allocated_bytes == truth["stats"]["allocated_bytes"]["all"][1]
    assert result.peak_requested_bytes == truth["stats"]["requested_bytes"]["all"][1]
