#!/usr/bin/env python3
"""Holds the dry run of one rank against the memory that torchtitan's team measured on 8 to 512 H100s.

    python benchmarks/torchtitan_rows.py [ROWS.json] [--only-comparable]

The rows are those of github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (December
2024): the peak of reserved memory, the largest of all ranks. ROWS.json has them as {"rows": [{"model",
"gpus", "local_batch", "ac", "technique", "seq", "measured_bytes"}, …]}; without it the two rows that can be
compared are used. Rank 0 runs `benchmarks/llama3_parallel.py`, a page of code of our own with torchtitan's
architecture, FSDP2 set-up, checkpointing policy and allocator setting; with torch.compile for each block
where FSDP is all else that was used. The first and the last stage of rows with pipelines run
`benchmarks/llama3_pipeline.py`, in eight micro-batches. What a row was measured with and is run without
(float8, AsyncTP, compilation beside tensor or context parallel) is the reason for its difference. One to two
minutes per row, and no GPU.
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
PIPELINE = Path(__file__).with_name("llama3_pipeline.py")
MICRO_BATCHES = 8  # torchtitan's default: as many as there are stages
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
    """What is run for a row: script and options, the size of the job, its ranks that count, and what differs
    from the row."""

    script: Path
    words: tuple[str, ...]
    gpus: int
    ranks: tuple[int, ...]
    differs: str | None

    @classmethod
    def of(cls, row: dict[str, Any]) -> Case:
        """The case that rebuilds a row as far as it can be."""
        technique = row["technique"]
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
        if "compile" in without and not context and not tensor:
            words.append("--compile")
            without.remove("compile")
        script, ranks, differs = SCRIPT, (0,), [f"run without {', '.join(without)}"] if without else []
        stages = re.search(r"PP(\d+)", technique)
        if stages:
            script, ranks = PIPELINE, (0, row["gpus"] * (int(stages[1]) - 1) // int(stages[1]))
            kind = "interleaved" if "Interleaved" in technique else "1f1b"
            words += ["--pp", stages[1], "--schedule", kind, "--micro-batches", str(MICRO_BATCHES)]
            differs.append(f"{MICRO_BATCHES} micro-batches (not stated)")
        return cls(
            script=script,
            words=tuple(words),
            gpus=row["gpus"],
            ranks=ranks,
            differs="; ".join(differs) or None,
        )


def run(case: Case, known: dict[Any, int]) -> int:
    """Peak reserved bytes of the fullest of the case's ranks; each case once."""
    key = (case.words, case.gpus)
    if key not in known:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's launcher sets it
        peaks = []
        for rank in case.ranks:
            result = dry_run(
                [str(case.script), *case.words],
                gpu=GPU, world_size=case.gpus, rank=rank, repeats=0, output="stderr",
            )  # fmt: skip
            if result.exit_code or result.oom:
                raise SystemExit(f"{' '.join(case.words)}: {result.error or result.oom}")
            peaks.append(result.peak_reserved_bytes)
        known[key] = max(peaks)
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
        if options.only_comparable and case.differs:
            continue
        start = (
            f"| {row['model']} | {row['gpus']} | {row['local_batch']} × {row['seq']} | {row['ac']} "
            f"| {row['technique']} | {format_bytes(row['measured_bytes'])} |"
        )
        reserved = run(case, known)
        error = 100 * (reserved / row["measured_bytes"] - 1)
        print(start, f"{format_bytes(reserved)} | {error:+.1f} % | {case.differs or ''} |", flush=True)


if __name__ == "__main__":
    main()
