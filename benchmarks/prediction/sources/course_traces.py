"""Two sources of one public course assignment: recorded memory snapshots, and figures of its benchmarks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prediction.case import Case, RowsFile, Source
from prediction.engines import Prediction

BEFORE_HOPPER, HOPPER = "a100-80gb", "h100-80gb"  # the sizes of the cuBLAS workspaces tell
PRINTED_MIB, PRINTED_GIB = (1 << 20) // 1000, (1 << 30) // 1000  # with three decimals


def snapshots(file: RowsFile) -> list[Case]:
    """The recorded stretch of each."""
    return [_snapshot(row, file.traces) for row in file.rows]


def _snapshot(row: Mapping[str, Any], traces: Path) -> Case:
    said = row["workload"]
    kind = "inference" if "inference" in row["file"] else "training"
    autocast = _casts(row, kind)
    sizes = {
        "context": said["context"],
        "width": said["d_model"],
        "inner": said["d_ff"],
        "layers": said["num_layers"],
        "heads": said["num_heads"],
    }
    words = [kind, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    return Case(
        row=row,
        name=f"{kind}, context {said['context']}" + (", bf16 autocast" if autocast else ""),
        script="course_snapshot.py",
        words=(*words, *(["--autocast"] if autocast else [])),
        gpu=BEFORE_HOPPER,
        portable=True,
        remark=partial(_beside_record, row, traces / f"cs336_medium_{said['context']}_{kind}.json.gz"),
    )


def _casts(row: Mapping[str, Any], kind: str) -> bool:
    """Whether a snapshot was recorded under autocast, which the rows do not say.

    Every block then makes 16 copies more in half precision.
    """
    each = {"inference": 60, "training": 300}[kind]
    return bool(row["actions"]["alloc"] > each * row["workload"]["num_layers"])


def _beside_record(row: Mapping[str, Any], trace: Path, run: Prediction) -> str:
    """Reserved bytes, and the recorded allocations one by one."""
    details = run.details or {}
    apart = details["reserved"] - row["peak_reserved_bytes"]
    words = [f"reserved {100 * apart / row['peak_reserved_bytes']:+.2g} %" if apart else "reserved equal"]
    if trace.exists():
        events = json.loads(gzip.decompress(trace.read_bytes()))["events"]
        recorded = [event[2] for event in events if event[0] == "alloc"]
        same = sum(a == b for a, b in zip(recorded, details["allocations"], strict=False))
        words.append(f"{same:,} of {len(recorded):,} allocations the same in the same order")
    return ", ".join(words)


def measurements(file: RowsFile) -> list[Case]:
    """Attention by itself, and training on two GPUs."""
    return [_attention(row) if row["kind"] == "attention" else _training(row) for row in file.rows]


def _attention(row: Mapping[str, Any]) -> Case:
    words = [row["backend"], str(row["batch"]), str(row["seq"]), str(row["d_head"]), row["dtype"]]
    return Case(
        row=row,
        name=f"attention, {row['backend']}, {row['seq']} × {row['d_head']}",
        script="course_attention.py",
        words=(*words, *(["--causal"] if row["causal"] else [])),
        gpu=HOPPER,
        portable=row["backend"] == "pytorch",
        resolution_bytes=PRINTED_MIB,
    )


def _training(row: Mapping[str, Any]) -> Case:
    names = ("local_batch", "context", "d_model", "d_ff", "layers", "heads", "vocab")
    return Case(
        row=row,
        name=f"two GPUs, {row['mode']}, rank {row['rank']}, {row['phase'].replace('_', ' ')}",
        script="course_ddp.py",
        words=(row["mode"], row["phase"], *(str(row[name]) for name in names)),
        gpu=HOPPER,
        world_size=row["world"],
        ranks=(row["rank"],),
        resolution_bytes=PRINTED_GIB,
    )


SNAPSHOTS = Source(
    name="snapshots_cs336_medium",
    title="CS336 assignment 2 run (Wedsonlin)",
    goal="0 B requested, reserved within 0.5 %",
    goal_percent=0.0,
    workloads=snapshots,
)
MEASUREMENTS = Source(
    name="cs336_measurements",
    title="CS336 assignment 2 measurements (Wedsonlin)",
    goal="1 %",
    goal_percent=1.0,
    workloads=measurements,
)
