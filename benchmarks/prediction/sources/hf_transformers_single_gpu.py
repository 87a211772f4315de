"""The transformers performance guide of 2022: bert-large on a V100, by nvidia-smi's counter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

MIB = 1 << 20
OPTIMIZERS = {"adamw": "adamw", "adafactor": "adafactor", "bitsandbytes": "adam8bit"}
STAND_IN = "a100-40gb"
"""CUDA 13 has no kernels for a V100. The context, which is another one, is taken off both."""
CONTEXT = "CUDA context + kernels after a 1x1 tensor"


def workloads(file: RowsFile) -> list[Case]:
    """A case for each setting, less the context that the same page gives."""
    contexts = [row["measured_bytes"] for row in file.rows if row.get("name") == CONTEXT]
    return [_case(row, contexts[0] if contexts else 0) for row in file.rows]


def _case(row: Mapping[str, Any], context: int) -> Case:
    name = row["name"]
    if name == CONTEXT:
        return Case(
            row=row, name=name, excluded="loaded all kernels (CUDA 11.2); it is taken off the rows below"
        )
    words = ("weights",) if "optimizer" not in row else _words(row)
    return Case(
        row=row,
        name=name,
        script="bert_guide.py",
        words=words,
        gpu=STAND_IN,
        counter="device",
        above="context",
        measured_above_bytes=context,
        resolution_bytes=MIB,
    )


def _words(row: Mapping[str, Any]) -> tuple[str, ...]:
    optimizer = OPTIMIZERS[row["optimizer"].split()[0].lower()]
    checkpoint = "checkpoint" if row["checkpointing"] else "keep"
    precision = "fp16" if row["fp16_amp"] else "fp32"
    return str(row["batch"]), str(row["grad_accum"]), checkpoint, precision, optimizer


SOURCE = Source(
    name="hf_transformers_single_gpu",
    title="Transformers performance guide (2022)",
    goal="12 %, settings in order",
    goal_percent=12.0,
    workloads=workloads,
)
