"""What a pool costs and saves against asking the system, and dynamic allocation against static policies.

    python benchmarks/pools.py            both tables, as Markdown
    python benchmarks/pools.py --json     the figures

Times are ratios of what was measured in turns in one run: a block is allocated and freed, written or not, by
the pool, by the system (mmap), and by the C library, itself a pool, that `torch.empty` asks. What cudaMalloc
costs is not measured: that takes a GPU.
The traces are recordings of real GPU jobs; MEMFIT_SHARED names their folder (else ../shared).
"""

from __future__ import annotations

import argparse
import gzip
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memfit.allocators import ALLOCATORS, AddressSpaceConfig, BaseAllocator
from memfit.core.units import format_bytes
from memfit.pools import DynamicAllocation, MemoryPool

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB)
TURNS = 7
SPACE_BYTES = 1 << 40
ALIGNMENT_BYTES = 512
STATIC = ("first_fit", "best_fit", "buddy", "tlsf")


def against_the_system(policy: Any) -> list[dict[str, Any]]:
    """One row for each size and whether the block is written: seconds per block allocated and freed."""
    pool = MemoryPool(512 * MIB, device="cpu", allocation_policy=policy)
    rows = []
    for size_bytes in SIZES_BYTES:
        ways = {
            "pool": lambda size=size_bytes: pool.empty(size, dtype=torch.uint8),
            "system": lambda size=size_bytes: torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8),
            "c_library": lambda size=size_bytes: torch.empty(size, dtype=torch.uint8),
        }
        for written in (True, False):
            seconds = in_turns(ways, repeats=max(3, min(1000, 64 * MIB // size_bytes)), written=written)
            took = {f"{way}_seconds": each for way, each in seconds.items()}
            rows.append({"size_bytes": size_bytes, "written": written, **took})
    return rows


def in_turns(ways: dict[str, Callable[[], torch.Tensor]], *, repeats: int, written: bool) -> dict[str, float]:
    """The median seconds of each way over several turns."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, allocate in ways.items():
            start = time.perf_counter()
            for _ in range(repeats):
                block = allocate()
                if written:
                    block.fill_(1)
                del block
            seconds[way].append((time.perf_counter() - start) / repeats)
    return {way: statistics.median(took) for way, took in seconds.items()}


def read_operations(path: Path) -> list[tuple[int, int]]:
    """``(block, size)`` for an allocation, ``(block, 0)`` for a free; none from before the trace."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    operations: list[tuple[int, int]] = []
    block_at: dict[int, int] = {}
    for address, size in _events(content):
        if size > 0:
            block_at[address] = len(operations)
            operations.append((len(operations), size))
        elif address in block_at:
            operations.append((block_at.pop(address), 0))
    return operations


def _events(content: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Addresses, with the size of what is allocated there, or a number below 0 for a free."""
    if "event_fields" in content:
        for action, address, size, *_ in content["events"]:
            if action == "alloc":
                yield address, size
            elif action in ("free", "free_requested"):
                yield address, -1
    elif "addr" in content["fields"]:
        for _, size, address, *_ in content["events"]:
            yield address, size


def on_traces(folder: Path) -> list[dict[str, Any]]:
    """One row for each trace and policy: the address space needed over the most live bytes."""
    rows = []
    for path in sorted(folder.glob("*.json.gz")):
        operations = read_operations(path)
        if not operations:
            continue  # that recording has no addresses, which pair frees with allocations
        live_bytes = most_live_bytes(operations)
        kinds: dict[str, type[BaseAllocator]] = {
            name: ALLOCATORS[name] for name in STATIC if name in ALLOCATORS
        }
        for name, kind in {**kinds, "dynamic": DynamicAllocation}.items():
            rows.append(
                {
                    "trace": path.name.removesuffix(".json.gz"),
                    "policy": name,
                    "live_bytes": live_bytes,
                    **replay(kind, operations),
                }
            )
    return rows


def most_live_bytes(operations: list[tuple[int, int]]) -> int:
    """The most bytes that are live at once: no allocator needs less."""
    sizes: dict[int, int] = {}
    live = most = 0
    for block, size in operations:
        live += size if size else -sizes.pop(block)
        if size:
            sizes[block] = size
            most = max(most, live)
    return most


def replay(kind: type[BaseAllocator], operations: list[tuple[int, int]]) -> dict[str, Any]:
    """The highest end of a block, also in the second of two equal passes, and the time per operation."""
    allocator = kind(AddressSpaceConfig(total_bytes=SPACE_BYTES, alignment_bytes=ALIGNMENT_BYTES))
    seconds, tops = 0.0, []
    for _ in range(2):
        out: dict[int, Any] = {}
        top = 0
        start = time.perf_counter()
        for block, size in operations:
            if size:
                placed = out[block] = allocator.allocate(size)
                end = placed.offset_bytes + placed.size_bytes
                top = max(top, end)
            else:
                allocator.deallocate(out.pop(block))
        seconds += time.perf_counter() - start
        tops.append(top)
        for left in out.values():
            allocator.deallocate(left)
    return {
        "needed_bytes": tops[0],
        "needed_again_bytes": tops[1],
        "seconds_per_operation": seconds / len(operations) / 2,
        "changes": len(getattr(allocator, "changes", ())),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"schema_version": 1, "system": against_the_system("best_fit")}
    traces = (
        Path(os.environ.get("MEMFIT_SHARED") or Path(__file__).parents[2] / "shared") / "truth" / "traces"
    )
    figures["traces"] = on_traces(traces) if traces.is_dir() else []
    sys.stdout.write((json.dumps(figures, indent=1) if arguments.json else tables(figures)) + "\n")


def tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| block | written | µs by the pool | system (mmap) | C library |", "|---|---|---|---|---|"]
    for row in figures["system"]:
        pool_seconds = row["pool_seconds"]
        ratios = " | ".join(
            f"{row[way] / pool_seconds:.2f}×" for way in ("system_seconds", "c_library_seconds")
        )
        written = "yes" if row["written"] else "no"
        lines.append(
            f"| {format_bytes(row['size_bytes'])} | {written} | {pool_seconds * 1e6:.1f} | {ratios} |"
        )
    if not figures["traces"]:
        return "\n".join([*lines, "", "no recorded traces here: MEMFIT_SHARED names their folder"])
    lines += [
        "",
        "| trace | policy | over live | over live, again | µs per operation | changes |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures["traces"]:
        first, again = (row[key] / row["live_bytes"] - 1 for key in ("needed_bytes", "needed_again_bytes"))
        lines.append(
            f"| {row['trace']} | {row['policy']} | {first:.2%} | {again:.2%} |"
            f" {row['seconds_per_operation'] * 1e6:.1f} | {row['changes']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
