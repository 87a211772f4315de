"""The caching allocator against PyTorch's own compiled one, on traces that are made here and now.

The goldens are a fixed set; these are new ones, from seeds. MEMFIT_ORACLE_SEED sets the first seed and
MEMFIT_ORACLE_TRACES how many there are, to look further than a usual run does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from memfit.allocators.caching import CachingAllocator
from memfit.allocators.fast.engine import has_numba
from memfit.allocators.replay import config_for, events_of, parse_operations, replay_events, replay_operations

from .fresh_traces import FreshTrace, fresh_trace, shrink
from .real_allocator import RealAllocator
from .test_golden import as_oracle_prints

pytestmark = [pytest.mark.oracle, pytest.mark.dryrun]

FIRST_SEED = int(os.environ.get("MEMFIT_ORACLE_SEED", "0"))
TRACES = int(os.environ.get("MEMFIT_ORACLE_TRACES", "30"))
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "maxsplit128": "max_split_size_mb:128",
    "roundup4": "roundup_power2_divisions:4",
    "gc06": "garbage_collection_threshold:0.6",
}


@pytest.fixture(scope="module")
def real() -> Iterator[RealAllocator]:
    with RealAllocator() as allocator:
        yield allocator


def trace_for(name: str, seed: int) -> FreshTrace:
    """Garbage is collected only where a memory fraction is set."""
    return fresh_trace(seed, limited=name == "gc06")


def modelled(trace: FreshTrace, settings: str) -> dict[str, Any]:
    listed = parse_operations(trace.json_lines().splitlines())
    config = config_for(listed, settings=settings)
    result = as_oracle_prints(replay_operations(listed.operations, CachingAllocator(config)))
    if has_numba():
        over_arrays = replay_events(events_of(listed.operations), CachingAllocator(config))
        assert as_oracle_prints(over_arrays) == result
    return result


def truth(real: RealAllocator, trace: FreshTrace, settings: str) -> dict[str, Any]:
    return real.run(
        trace.operations, total_bytes=trace.total_bytes, fraction=trace.fraction, settings=settings
    )


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs, in words."""
    stats = [
        f"stats[{name!r}]: modelled {ours['stats'].get(name)}, real {theirs['stats'].get(name)}"
        for name in sorted(ours["stats"].keys() | theirs["stats"].keys())
        if ours["stats"].get(name) != theirs["stats"].get(name)
    ]
    return stats + [
        f"{name}:\n  modelled {ours[name]}\n  real     {theirs[name]}"
        for name in ("placements", "reserved", "ooms", "segments")
        if ours[name] != theirs[name]
    ]


def report(real: RealAllocator, trace: FreshTrace, settings: str, where: str) -> str:
    """The shortest trace that still differs, to be replayed by anyone, and how it differs."""
    least = shrink(trace, lambda shorter: modelled(shorter, settings) != truth(real, shorter, settings))
    lines = differences(modelled(least, settings), truth(real, least, settings))
    return "\n".join(
        [
            f"{where}, PYTORCH_ALLOC_CONF={settings!r}: the model differs from PyTorch's allocator;"
            f" shrunk to {len(least.operations)} operations:",
            least.json_lines(),
            *lines,
        ]
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_fresh_traces_end_as_in_pytorch(real: RealAllocator, name: str) -> None:
    settings = SETTINGS[name]
    for seed in range(FIRST_SEED, FIRST_SEED + TRACES):
        trace = trace_for(name, seed)
        if modelled(trace, settings) != truth(real, trace, settings):
            pytest.fail(report(real, trace, settings, f"seed {seed}"), pytrace=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_private_pools_end_as_in_pytorch(real: RealAllocator, name: str) -> None:
    """Blocks of ``torch.cuda.MemPool``. With expandable segments no pool is let go: where pages of it were
    given back before, torch 2.14.1 fails an assertion of its own (``cudaMalloc_count > 0``) and aborts."""
    settings = SETTINGS[name]
    for seed in range(FIRST_SEED, FIRST_SEED + max(TRACES // 4, 1)):
        trace = fresh_trace(seed, limited=name == "gc06", pools=True)
        if name == "expandable":
            kept = (entry for entry in trace.operations if entry["op"] != "release_pool")
            trace = replace(trace, operations=tuple(kept))
        if modelled(trace, settings) != truth(real, trace, settings):
            pytest.fail(report(real, trace, settings, f"seed {seed}"), pytrace=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_traces_reach_the_rules(name: str) -> None:
    """Traces that never fill a device, or collect garbage, would compare little."""
    totals: Counter[str] = Counter()
    for seed in range(20):
        result = modelled(trace_for(name, seed), SETTINGS[name])
        stats = result["stats"]
        for key in ("num_alloc_retries", "num_ooms", "num_device_free"):
            totals[key] += stats[key]
        totals["oversize"] += stats["oversize_allocations"][2]
        for segment in result["segments"]:
            totals[segment["pool"]] += 1
            totals["other streams"] += segment["stream"] > 0
            totals["waiting"] += sum(state == "P" for *_, state in segment["blocks"])
    reached = (
        "num_alloc_retries",
        "num_ooms",
        "num_device_free",
        "waiting",
        "small",
        "large",
        "other streams",
    )
    assert min(totals[key] for key in reached) >= 3, totals
    assert (totals["oversize"] > 20) == (name == "maxsplit128")


def test_a_wrong_model_is_found_and_its_trace_is_shrunk(real: RealAllocator) -> None:
    """With the settings of another run the model must differ, already for a few operations."""
    wrong, right = SETTINGS["roundup4"], SETTINGS["default"]
    trace = fresh_trace(1)

    def fails(shorter: FreshTrace) -> bool:
        return modelled(shorter, wrong) != truth(real, shorter, right)

    assert fails(trace)
    least = shrink(trace, fails)

    assert len(least.operations) == 1
    assert least.operations[0]["op"] == "alloc"
    assert not fails(replace(least, operations=()))
    assert differences(modelled(least, wrong), truth(real, least, right))
