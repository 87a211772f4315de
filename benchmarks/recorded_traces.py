"""Lifetimes of the blocks in recordings of real GPU jobs, for the benchmarks beside this file.

MEMFIT_SHARED names the folder of the recordings, else ../shared beside the project.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from memfit.allocators.lifetimes import Lifetimes
from memfit.allocators.replay import Operation, Step

Row = tuple[int, int, int]
BEFORE = -1
"""The moment at which blocks begin that were there before the recording."""


def shared_folder(*inside: str) -> Path:
    """A folder of recordings; says so and ends the benchmark, as done, where there is none."""
    root = Path(os.environ.get("MEMFIT_SHARED") or Path(__file__).parents[2] / "shared")
    folder = root.joinpath("truth", *inside)
    if not folder.is_dir():
        print(f"skipped: no recordings here ({folder}); MEMFIT_SHARED names their folder")
        sys.exit(0)
    return folder


def recorded_traces() -> Iterator[tuple[str, Lifetimes]]:
    """Each recording's name and blocks."""
    for path in sorted(shared_folder("traces").glob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
        rows = [row for row in _rows(document) if row[0] < row[1] and row[2] > 0]
        yield path.name.removesuffix(".json.gz"), Lifetimes.of(sorted(rows))


def _rows(document: dict) -> Iterator[Row]:
    """A snapshot's events have an action; a profiler's have signed bytes, with or without an address."""
    events = document["events"]
    if "event_fields" in document:
        names = {"alloc": 1, "free_completed": -1}
        signed = [(names.get(event[0], 0), event[1], event[2]) for event in events]
    else:
        addressed = "addr" in document["fields"]
        # Without addresses a free is of the latest block of its size.
        signed = [
            (1 if event[1] > 0 else -1, event[2] if addressed else abs(event[1]), abs(event[1]))
            for event in events
        ]
    live: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for moment, (sign, key, size) in enumerate(signed):
        if sign > 0:
            live[key].append((moment, size))
        elif sign < 0:
            begun, size = live[key].pop() if live[key] else (BEFORE, size)
            yield begun, moment, size
    for left in live.values():
        yield from ((begun, len(events), size) for begun, size in left)
    born = {key for key, left in live.items() if left}
    for segment in document.get("segments", []):
        for address, _, requested, state in segment["blocks"]:
            if state == "active_allocated" and address not in born:
                yield BEFORE, len(events), requested


def operations_of(lifetimes: Lifetimes) -> list[Operation]:
    """The blocks as a program; frees come before allocations of the same moment."""
    columns = (lifetimes.lower, lifetimes.upper, lifetimes.size_bytes)
    blocks = list(enumerate(zip(*(column.tolist() for column in columns), strict=True)))
    timed = [(lower, 1, Operation(int(Step.ALLOC), block, size)) for block, (lower, _, size) in blocks]
    timed += [(upper, 0, Operation(int(Step.FREE), block)) for block, (_, upper, _) in blocks]
    timed.sort(key=lambda entry: entry[:2])
    return [operation for _, _, operation in timed]
