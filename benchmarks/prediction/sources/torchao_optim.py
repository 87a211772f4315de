"""torchao's measurements of optimizers with small states: two vision transformers and a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

PRINTED_BYTES = 10_000_000  # two decimals of 10**9
LLAMA_PRINTED_BYTES = (1 << 30) // 10
LONGEST_ALPACA_TOKENS = 1304  # with Llama 2's tokenizer: LitGPT's tutorials/resource-tables.md

LLAMA_NOTE = "batch 2, torchtune's default; transformers' model; GB are GiB: torchtune divides by 2^30"
FOUR_BIT_NOTE = (
    "; PyTorch 2.14's compiler holds the codes of the largest weight as int64 between two kernels: as bytes "
    "they would take 1.71 GiB less (33.04 GiB in all)"
)

OPTIMIZERS = {
    "PyTorch AdamW fused": "fused",
    "AdamW on GPU": "fused",
    "PyTorch": "foreach",
    "bnb 8-bit": "bitsandbytes-8bit",
    "ao 8-bit": "torchao-8bit",
    "ao 4-bit": "torchao-4bit",
    "ao FP8 E4M3": "torchao-fp8",
    "ao CPU offload": "fused",
    "ao CPU offload + offload_gradients": "fused",
}
OFFLOADS = {"ao CPU offload": "states", "ao CPU offload + offload_gradients": "gradients"}
GPUS = {"RTX 4070 Ti SUPER": "rtx4070tisuper-16gb", "A100": "a100-80gb"}


def workloads(file: RowsFile) -> list[Case]:
    """Their script's training steps with random pictures or tokens."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    model, optimizer = row["model"], row["optimizer"]
    name = f"{_short(model)}, {optimizer}" + (f", {row['config']}" if "config" in row else "")
    gpu = next((key for said, key in GPUS.items() if said in row["gpu"]), "")
    if optimizer not in OPTIMIZERS or not gpu:
        return Case(row=row, name=name, excluded=f"{optimizer if gpu else row['gpu']} is not to be had here")
    words = [_model(model), OPTIMIZERS[optimizer]]
    if optimizer in OFFLOADS:
        words += ["--offload", OFFLOADS[optimizer]]
    make = _language if "Llama2-7B" in model else _vision
    return make(row, name, gpu, words)


def _vision(row: Mapping[str, Any], name: str, gpu: str, words: list[str]) -> Case:
    said = row.get("config", "")
    options = ["--batch", str(row["batch"])]
    if "amp" in row or "AMP" in said:
        options.append("--autocast")
    if row.get("checkpointing"):
        options.append("--checkpointing")
    compiled = row.get("compile") is True or "compiled" in said
    return Case(
        row=row,
        name=name,
        script="optimizer_steps.py",
        words=(*words, *options),
        gpu=gpu,
        note="run without compiling the model" if compiled else "",
        resolution_bytes=PRINTED_BYTES,
        portable=words[1] in ("fused", "foreach") and "--offload" not in words,
    )


def _language(row: Mapping[str, Any], name: str, gpu: str, words: list[str]) -> Case:
    options = ["--batch", "2", "--tokens", str(LONGEST_ALPACA_TOKENS), "--checkpointing"]
    return Case(
        row=row,
        name=name,
        script="optimizer_steps.py",
        words=(*words, *options),
        gpu=gpu,
        printed_in_gib=True,
        note=LLAMA_NOTE + (FOUR_BIT_NOTE if words[1] == "torchao-4bit" else ""),
        resolution_bytes=LLAMA_PRINTED_BYTES,
        portable=words[1] == "fused",
    )


def _model(text: str) -> str:
    if "Llama2-7B" in text:
        return "llama2-7b"
    return "giant-dinov2" if "giant" in text else "huge"


def _short(text: str) -> str:
    return {"llama2-7b": "Llama2-7B", "giant-dinov2": "ViT-g DINOv2", "huge": "ViT-H"}[_model(text)]


SOURCE = Source(
    name="torchao_optim",
    title="torchao low-bit optimizer README",
    goal="3 %",
    goal_percent=3.0,
    workloads=workloads,
)
