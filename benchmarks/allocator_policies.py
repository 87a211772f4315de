"""Every policy on recordings of real GPU jobs: what it costs per operation, and how much memory it needs.

    python benchmarks/allocator_policies.py [--plot docs/images/allocator_policies.svg] [--json]
    python benchmarks/allocator_policies.py --holes

A policy's need is the least range, to half a percent, in which it serves the whole recording, over the most
bytes that are live at once (1.00 is the ideal, and what offline packing gets near). What it needs beyond that
is lost inside blocks (rounding) or between them. PyTorch's caching allocator cannot be measured so exactly,
since it gives memory back under pressure: for it, the least device on which the recording runs counts.
The cost is the shortest of three passes at that size: microseconds of one core per allocation or free.
With ``--holes``: how the cost of an allocation and its free grows with the number of free stretches.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded_traces import operations_of, recorded_traces

from memfit.allocators import ALLOCATORS, AddressSpaceConfig, BaseAllocator, CachingConfig, pack
from memfit.allocators.comparison import least_total_bytes, run_policy


def made(name: str, total_bytes: int) -> BaseAllocator:
    config = CachingConfig if name == "caching" else AddressSpaceConfig
    return ALLOCATORS[name](config(total_bytes=total_bytes))


def rows_of(passes: int = 3) -> Iterator[dict[str, Any]]:
    for trace, lifetimes in recorded_traces():
        operations, peak = operations_of(lifetimes), lifetimes.peak_live_bytes
        ideal = pack(lifetimes, alignment_bytes=512)
        yield {"trace": trace, "policy": "offline packing", "need": ideal.height_bytes / peak}
        for name in ALLOCATORS:
            least = least_total_bytes(operations, lambda total, name=name: made(name, total), from_bytes=peak)
            runs = [run_policy(operations, made(name, least)) for _ in range(passes)]
            yield {
                "trace": trace,
                "policy": name,
                "need": least / peak,
                "internal_percent": 100 * runs[0].internal_waste,
                "microseconds": 1e6 * min(run.seconds for run in runs) / len(operations),
            }


def table(rows: list[dict[str, Any]]) -> str:
    """One line a policy: need per trace, then the worst rounding and the range of costs."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    lines = [
        "| policy | " + " | ".join(traces) + " | lost inside blocks | µs per operation |",
        "|---|" + "---:|" * (len(traces) + 2),
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["trace"]: row for row in rows if row["policy"] == policy}
        inside = [row["internal_percent"] for row in own.values() if "internal_percent" in row]
        costs = [row["microseconds"] for row in own.values() if "microseconds" in row]
        cells = [f"{own[trace]['need']:.3f}" for trace in traces]
        cells += (
            [f"{min(inside):.1f}–{max(inside):.1f} %", f"{min(costs):.1f}–{max(costs):.1f}"]
            if costs
            else ["", ""]
        )
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_with_holes(name: str, holes: int, pairs: int = 300) -> float:
    """Microseconds for an allocation and its free, in a range with so many free stretches of mixed sizes."""
    generator = random.Random(0)
    sizes = [512 * generator.randint(1, 40) for _ in range(2 * holes)]
    allocator = ALLOCATORS[name](AddressSpaceConfig(total_bytes=3 * sum(sizes)))
    blocks = [allocator.allocate(size) for size in sizes]
    for block in blocks[::2]:
        allocator.deallocate(block)
    wanted = [512 * generator.randint(1, 60) for _ in range(pairs)]
    began = time.process_time()
    for size in wanted:
        allocator.deallocate(allocator.allocate(size))
    return 1e6 * (time.process_time() - began) / pairs


def table_of_holes() -> str:
    counts = (10, 100, 1_000, 10_000)
    lines = [
        "| policy | " + " | ".join(f"{count:,} holes" for count in counts) + " |",
        "|---|" + "---:|" * len(counts),
    ]
    for name in ALLOCATORS:
        if name != "caching":
            costs = (min(cost_with_holes(name, count) for _ in range(3)) for count in counts)
            lines.append(f"| {name} | " + " | ".join(f"{cost:.1f}" for cost in costs) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "memfit"  # the same figure from the same figures
    from matplotlib import pyplot

    policies = [policy for policy in dict.fromkeys(row["policy"] for row in rows) if policy in ALLOCATORS]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for trace in dict.fromkeys(row["trace"] for row in rows):
        own = {row["policy"]: row for row in rows if row["trace"] == trace}
        axes.plot([own[policy]["need"] for policy in policies], policies, "o", alpha=0.7, label=trace)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("least memory that serves the recording / most bytes live at once")
    axes.grid(axis="both", alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, help="write a figure there (.svg or .png)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--holes", action="store_true", help="cost against the number of free stretches")
    options = parser.parse_args()
    if options.holes:
        print(table_of_holes())
        return
    rows = list(rows_of())
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
