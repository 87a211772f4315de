"""LitGPT's published memory of fine-tuning: one table by its recipes, one of October 2023."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

MODELS = frozenset(
    """phi-1.5 phi-2 phi-3-mini-4k stablelm-3b stablelm-base-alpha-3b falcon-7b llama2-7b llama-2-7b
    llama2-13b llama-3-8b llama-3.1-8b llama-3.2-1B llama-3.2-3B mistral-7b mistral-7b-v0.2 tiny-llama
    gemma-2b gemma-7b gemma-2-2b gemma-2-9b""".split()
)
EVERYWHERE: Mapping[str, int] = {
    "gemma-2b": 8,
    "gemma-7b": 16,
    "gemma-2-2b": 8,
    "gemma-2-9b": 16,
    "phi-2": 8,
    "phi-3-mini-4k": 8,
    "tiny-llama": 32,
}
"""Recipes with LoRA in all linear layers and the head, and its rank; the others have it in queries and
values, with rank 32."""
_NOT_ONE_GPU = (
    "weights, gradients and AdamW's states alone are 30 GB in bf16: the row cannot be of one GPU of 24 GB"
)
_SAMPLE = "the longest sample decides, and 512 is the most that a recipe allows"

_REBUILT = "LoRA and adapters are rebuilt from their description, not from the code of 2023"


def workloads(file: RowsFile) -> list[Case]:
    """A case for each row on one GPU."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    quantized = row.get("quantization", "nf4" if row["method"] == "qlora" else "none")
    name = f"{row['model']} {row['method']} {quantized} {row['micro_batch']}"
    if row["model"] not in MODELS:
        return Case(
            row=row, name=name, excluded=f"the configuration of {row['model']} is not among the benchmark's"
        )
    if row["method"].endswith("gpu"):
        return Case(row=row, name=name, excluded="sharded over four GPUs by Fabric's FSDP strategy")
    if (row["model"], row["method"]) == ("phi-3-mini-4k", "full"):
        return Case(row=row, name=name, excluded=_NOT_ONE_GPU)
    recipe = "longest_sequence" not in row
    given = {
        "model": row["model"],
        "method": _method(row, quantized, recipe),
        "batch": row["micro_batch"],
        "tokens": row.get("longest_sequence") or row["max_seq"],
    }
    return Case(
        row=row,
        name=name,
        script="litgpt_finetune.py",
        words=(json.dumps(given),),
        gpu=row["gpu"].removesuffix(" 24 GB"),
        counter="allocated",
        note=_note(quantized, recipe),
        resolution_bytes=10_000_000,
    )


def _note(quantized: str, recipe: bool) -> str:
    if quantized != "none":
        return (
            "bitsandbytes of the time seems to have kept the input of every frozen layer for backward (by "
            "arithmetic 2.0 GB for Llama 2 7B, of 2.9 that are missing)"
        )
    return _SAMPLE if recipe else _REBUILT


def _method(row: Mapping[str, Any], quantized: str, recipe: bool) -> dict[str, Any]:
    method = "lora" if row["method"] == "qlora" else row["method"]
    everywhere = recipe and row["model"] in EVERYWHERE
    rank = EVERYWHERE.get(row["model"], 32) if recipe else 8
    return {
        "name": method,
        "quantized": quantized,
        "rank": rank if method == "lora" else 0,
        "everywhere": everywhere and method == "lora",
        "upcasts": recipe,
    }


SOURCE = Source(
    name="litgpt",
    title="LitGPT finetuning tables",
    goal="no out-of-memory row called a fit, no fitting row called out of memory",
    goal_percent=25.0,
    workloads=workloads,
)
