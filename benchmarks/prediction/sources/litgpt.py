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
    "gemma-2-2b": 16,
    "gemma-2-9b": 16,
    "phi-2": 8,
    "phi-3-mini-4k": 8,
    "tiny-llama": 32,
}
"""Recipes with LoRA in all linear layers and the head, and its rank; the others have it in queries and
values, with rank 32."""
QLORA_RANK: Mapping[str, int] = {"gemma-2b": 16}
"""Where it is another one than without quantization."""
_NOT_ONE_GPU = (
    "weights, gradients and AdamW's states alone are 30 GB in bf16: the row cannot be of one GPU of 24 GB"
)
_SAMPLES = (
    "which samples were drawn is not recorded: one of 512 tokens, the most that a recipe allows, after one "
    "of 256"
)
_NORMS = (
    "norms in fp32, as all of the table's llama rows have it and the code since 2023-10-24, eight days after "
    "the commit that the table names"
)


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
        "lengths": _lengths(row),
    }
    return Case(
        row=row,
        name=name,
        script="litgpt_finetune.py",
        words=(json.dumps(given),),
        gpu=row["gpu"].removesuffix(" 24 GB"),
        counter="allocated",
        note=_SAMPLES if recipe else _NORMS,
        resolution_bytes=10_000_000,
    )


def _lengths(row: Mapping[str, Any]) -> list[int]:
    """Tokens of the micro-batches of a step, of which each keeps part of its memory into the next one.

    The script of 2023 took the longest sample first; recipes draw, and a batch of half the most tokens is
    taken for the one before the longest.
    """
    longest = row.get("longest_sequence")
    return [longest, longest // 4] if longest else [row["max_seq"] // 2, row["max_seq"]]


def _method(row: Mapping[str, Any], quantized: str, recipe: bool) -> dict[str, Any]:
    method = "lora" if row["method"] == "qlora" else row["method"]
    everywhere = recipe and row["model"] in EVERYWHERE
    ranks = {**EVERYWHERE, **QLORA_RANK} if row["method"] == "qlora" else EVERYWHERE
    rank = ranks.get(row["model"], 32) if recipe else 8
    return {
        "name": method,
        "quantized": quantized,
        "rank": rank if method == "lora" else 0,
        "everywhere": everywhere and method == "lora",
        "weighs_wide": not recipe,
    }


SOURCE = Source(
    name="litgpt",
    title="LitGPT finetuning tables",
    goal="no out-of-memory row called a fit, no fitting row called out of memory",
    goal_percent=25.0,
    workloads=workloads,
)
