#!/usr/bin/env python3
"""Holds the dry run against memory snapshots that somebody recorded on a real GPU.

    python benchmarks/recorded_snapshots.py CHECKOUT [--runs training:128 inference:128 …]

CHECKOUT is a clone of github.com/Wedsonlin/assignment2-systems at 87b0864: a public training script (a course
assignment: 424 M parameters, 24 layers, fp32, its own AdamW loop) with the snapshots of its author's GPU in
`results/`. The script is run as it is, by `memfit dryrun`, and dumps its own snapshot, which the write guard
keeps in the scratch folder; the two snapshots are then compared event by event. It needs Python 3.12 (an
f-string of the script's) with torch, einops, einx and jaxtyping, and about a minute per run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "--d_model 1024 --num_layers 24 --num_heads 16 --d_ff 4096".split()
OPTIONS = [*MODEL, "--model_name", "medium", "--memory-profiler", "pytorch"]
PATTERNS = {"training": "full-training-step", "inference": "forward-only"}
RUNS = [f"{kind}:{context}" for context in (128, 256, 512, 1024) for kind in PATTERNS]
AUTOCAST = {"training:512", "inference:512", "training:1024"}
"""Recorded under bf16 autocast, as the sizes of their casts show."""


class _Plain(pickle.Unpickler):
    """A snapshot is dictionaries, lists, texts and numbers: nothing else is loaded."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a memory snapshot holds no {module}.{name}")


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a snapshot says about the stretch that it recorded."""

    alloc_sizes: tuple[int, ...]
    peak_requested_bytes: int
    reserved_bytes: int

    @classmethod
    def of(cls, content: bytes) -> Window:
        snapshot = _Plain(io.BytesIO(content)).load()
        events = snapshot["device_traces"][0]
        sign = {"alloc": 1, "free_completed": -1}
        changes = [sign[event["action"]] * event["size"] for event in events if event["action"] in sign]
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        live = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
        now = peak = live - sum(changes)
        for change in changes:
            now += change
            peak = max(peak, now)
        return cls(
            alloc_sizes=tuple(change for change in changes if change > 0),
            peak_requested_bytes=peak,
            reserved_bytes=sum(segment["total_size"] for segment in snapshot["segments"]),
        )


def dry_run(checkout: Path, run: str, gpu: str) -> tuple[dict[str, Any], Window]:
    """Run the script unmodified; its result, and the window of the snapshot that it dumped."""
    kind, context = run.split(":")
    script = ["nsys_profile.py", "--context_length", context, *OPTIONS, "--pattern", PATTERNS[kind]]
    script += ["--autocast", "true"] if run in AUTOCAST else []
    command = [
        sys.executable,
        "-m",
        "memfit",
        "dryrun",
        "--gpu",
        gpu,
        "--steps",
        "all",
        "--json",
        "--",
        *script,
    ]
    environment = os.environ | {"PYTHONPATH": str(checkout / "cs336-basics")}
    done = subprocess.run(
        command, cwd=checkout / "cs336_systems", env=environment, stdout=subprocess.PIPE, check=True
    )
    result = json.loads(done.stdout)
    (dumped,) = Path(result["scratch_folder"]).rglob("*.pickle")
    return result, Window.of(dumped.read_bytes())


def compare(recorded: Window, ours: Window) -> dict[str, Any]:
    """How far apart two windows are."""
    same = sum(a == b for a, b in zip(recorded.alloc_sizes, ours.alloc_sizes, strict=False))
    reserved = 100 * (ours.reserved_bytes / recorded.reserved_bytes - 1)
    return {
        "allocations": f"{same} of {len(recorded.alloc_sizes)}",
        "recorded_peak_requested_bytes": recorded.peak_requested_bytes,
        "bytes_apart": ours.peak_requested_bytes - recorded.peak_requested_bytes,
        "reserved_percent_apart": round(reserved, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument(
        "--gpu", default="a100-80gb", help="any before Hopper: the recordings show such a card"
    )
    options = parser.parse_args()
    apart = 0
    for run in options.runs:
        kind, context = run.split(":")
        name = f"medium_{context}_{kind}_memory_snapshot.pickle"
        recorded = Window.of((options.checkout / "results" / name).read_bytes())
        result, ours = dry_run(options.checkout.resolve(), run, options.gpu)
        row = {
            "run": run,
            **compare(recorded, ours),
            "whole_run_peak_requested_bytes": result["peak_requested_bytes"],
        }
        row |= {"torch": result["torch"], "wall_seconds": round(result["wall_seconds"], 1)}
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
        apart = max(apart, abs(row["bytes_apart"]))
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
