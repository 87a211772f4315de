"""Offline packing: published hard problems at their capacity, recordings of GPU jobs against their peak.

    python benchmarks/packing.py [problems] [traces] [--json]

Every packing is checked by the naive validator. Times are of one core: wall seconds, and processor seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from recorded_traces import recorded_traces, shared_folder

from memfit.allocators.lifetimes import Lifetimes, read_lifetimes
from memfit.allocators.packing import pack
from memfit.allocators.validate import packing_problem

CAPACITY_BYTES = 1_048_576


def measured(name: str, lifetimes: Lifetimes, capacity_bytes: int | None) -> dict[str, Any]:
    wall, processor = time.perf_counter(), time.process_time()
    packing = pack(lifetimes, capacity_bytes=capacity_bytes)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    allowed = capacity_bytes or packing.height_bytes
    return {
        "name": name,
        "blocks": len(lifetimes),
        "peak_live_bytes": packing.peak_live_bytes,
        "height_bytes": packing.height_bytes,
        "excess_percent": 100 * packing.excess,
        "method": packing.method,
        "problem": packing_problem(lifetimes, packing.offsets.tolist(), capacity_bytes=allowed),
        "wall_seconds": wall,
        "processor_seconds": processor,
    }


def rows_of(kinds: list[str]) -> Iterator[dict[str, Any]]:
    if "problems" in kinds:
        for path in sorted(shared_folder("minimalloc").glob(f"*.{CAPACITY_BYTES}.csv")):
            yield measured(path.name.split(".")[0], read_lifetimes(path), CAPACITY_BYTES)
    if "traces" in kinds:
        for name, lifetimes in recorded_traces():
            yield measured(name, lifetimes, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="problems|traces", default=["problems", "traces"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = rows_of(options.kinds)
    if options.json:
        print(json.dumps(list(rows), indent=2))
        return
    print("| of | blocks | peak live bytes | height | above the peak | by | seconds | processor seconds |")
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    for row in rows:
        print(
            f"| {row['name']} | {row['blocks']} | {row['peak_live_bytes']} | {row['height_bytes']}"
            f" | {row['excess_percent']:.3f} % | {row['method']}{' INVALID' * bool(row['problem'])}"
            f" | {row['wall_seconds']:.2f} | {row['processor_seconds']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
