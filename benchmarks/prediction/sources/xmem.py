"""xMem's released results: what nvidia-smi's counter gained while models trained."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from prediction.case import SCRIPTS, Case, RowsFile, Source

sys.path.append(str(SCRIPTS))  # the models' names are beside the script that builds them

MIB = 1 << 20
NOTES = {
    "MnasNet": "cause not known: more stayed in the allocator's cache than workspaces explain (the run with "
    "batch 323 also went through when it was limited to 2,648 MiB)",
    "MobeNetV3Small": "a small run: half of a convolution's workspace and the loaded kernels weigh 7 %",
    "VGG19": "the workspace of its second convolution may be anything up to 1.2 GB",
    "ConvNeXtTiny": "cause not known: backward reserves 280 MiB above forward here and did not there; xMem's "
    "simulation of the same allocator is as much too high",
    "ConvNeXtBase": "called out of memory, and it was none: as ConvNeXtTiny, on a card that it nearly fills; "
    "the figure is what was reserved by then",
}
_LENGTHS = "which lines were drawn is not recorded; the figure is the middle of five draws"
_SHORTER = f"{_LENGTHS}; with one batch of 117 tokens among the four it is 4,058 MiB"


def workloads(file: RowsFile) -> list[Case]:
    """A case for each row whose model is known."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    from xmem_models import LANGUAGE, VISION

    model, optimizer, batch = row["model"], row["optimizer"], row["batch"]
    name = f"{model} {optimizer} {batch}"
    kind = "vision" if model in VISION else "language"
    if model not in VISION and model not in LANGUAGE:
        return Case(row=row, name=name, excluded=f"the configuration of {model} is not among the benchmark's")
    if row.get("dtype", "fp32") != "fp32":
        return Case(row=row, name=name, excluded=f"{row['dtype']}: how it was cast is not in the row")
    zero = "start" if row["zero_grad"].startswith("at iteration") else "backward"
    return Case(
        row=row,
        name=name,
        script="xmem_training.py",
        words=(kind, model, optimizer, str(batch), zero),
        gpu=gpu_of(row["gpu"]),
        counter="expected" if kind == "vision" else "reading",
        above="bare context" if kind == "vision" else "",
        note=NOTES.get(model, "") if kind == "vision" else _of_lengths(model, batch),
        resolution_bytes=2 * MIB,
    )


def _of_lengths(model: str, batch: int) -> str:
    if batch >= 20:  # then some line has 128 tokens
        return ""
    return _SHORTER if (model, batch) == ("cerebras/Cerebras-GPT-111M", 10) else _LENGTHS


def gpu_of(text: str) -> str:
    """``"NVIDIA GeForce RTX 3060 (12622168064 B)"`` as ``memfit gpus`` knows it."""
    return re.sub(r"\s*\(.*", "", text)


SOURCE = Source(
    name="xmem",
    title="xMem (Middleware 2025) released evaluation results, sample of 37 of about 13.7k JSON files",
    goal="median below 4 %, largest below 12 % (xMem itself, all 37 rows: 4.4 %, 15.3 %)",
    goal_percent=12.0,
    workloads=workloads,
)
