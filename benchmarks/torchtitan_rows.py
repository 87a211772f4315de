#!/usr/bin/env python3
"""Holds the dry run of one rank against the memory that torchtitan's team measured on 8 to 512 H100s.

    python benchmarks/torchtitan_rows.py [ROWS.json] [--only-comparable]

The rows are those of github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (December
2024): the peak of reserved memory, the largest of all ranks. ROWS.json has them as {"rows": [{"model",
"gpus", "local_batch", "ac", "technique", "seq", "measured_bytes"}, …]}; without it the two rows that can be
compared are used. Rank 0 runs `benchmarks/llama3_parallel.py`, a page of code of our own with torchtitan's
architecture, FSDP2 set-up, checkpointing policy and allocator setting. Rows that were measured with
torch.compile or float8 are run without them, which is the reason for their difference. About half a minute
per row, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit import dry_run
from memfit.core.units import format_bytes

SCRIPT = Path(__file__).with_name("llama3_parallel.py")
GPU = "96GiB,sm90"  # H100 with 96 GB of HBM2e
GIB = 1 << 30
COMPARABLE = [
    {"gpus": gpus, "measured_bytes": int(gib * GIB)} | {
        "model": "Llama 3.1 8B", "local_batch": 2, "ac": "selective", "technique": "FSDP", "seq": 8192
    }
    for gpus, gib in ((8, 82.4), (128, 67.0))
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run for a row: the script's options, the size of the job, and what differs from the row."""

    words: tuple[str, ...]
    gpus: int
    differs: str | None

    @classmethod
    def of(cls, row: dict[str, Any]) -> Case | None:
        """None for what the script does not rebuild (pipelines)."""
        technique = row["technique"]
        if "PP" in technique:
            return None
        context = re.search(r"CP(\d+)", technique)
        tensor = re.search(r"TP(\d+)", technique) or ("AsyncTP" in technique and re.search("(8)", "8"))
        words = [
            "--flavor", row["model"].split()[-1], "--batch", str(row["local_batch"]),
            "--seq", str(row["seq"]), "--ac", row["ac"],
        ]  # fmt: skip
        if context:
            words += ["--cp", context[1]]
        if tensor:
            words += ["--tp", tensor[1]]
        without = [name for name in ("compile", "float8", "AsyncTP") if name in technique]
        if technique.startswith("same"):
            without = ["compile", "float8", "AsyncTP"]
        return cls(
            words=tuple(words),
            gpus=row["gpus"],
            differs=f"run without {', '.join(without)}" if without else None,
        )


def run(case: Case, known: dict[Any, int]) -> int:
    """Peak reserved bytes of rank 0; each case once."""
    key = (case.words, case.gpus)
    if key not in known:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's launcher sets it
        result = dry_run(
            [str(SCRIPT), *case.words], gpu=GPU, world_size=case.gpus, rank=0, repeats=0, output="stderr"
        )
        if result.exit_code:
            raise SystemExit(f"{' '.join(case.words)}: {result.error}")
        known[key] = result.peak_reserved_bytes
    return known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path)
    parser.add_argument("--only-comparable", action="store_true")
    options = parser.parse_args()
    rows = COMPARABLE if options.rows is None else json.loads(options.rows.read_text())["rows"]
    known: dict[Any, int] = {}
    print(
        "| model | GPUs | batch × sequence | checkpointing | technique | measured | dry run | error | why |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        case = Case.of(row)
        if options.only_comparable and (case is None or case.differs):
            continue
        start = (
            f"| {row['model']} | {row['gpus']} | {row['local_batch']} × {row['seq']} | {row['ac']} "
            f"| {row['technique']} | {format_bytes(row['measured_bytes'])} |"
        )
        if case is None:
            print(start, "– | – | not rebuilt: pipeline stages |", flush=True)
            continue
        reserved = run(case, known)
        error = 100 * (reserved / row["measured_bytes"] - 1)
        print(start, f"{format_bytes(reserved)} | {error:+.1f} % | {case.differs or ''} |", flush=True)


if __name__ == "__main__":
    main()
