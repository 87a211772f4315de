"""Liger-Kernel's published benchmark of operations: the rows of plain PyTorch, by date and GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

OWN_FORMS = frozenset(
    """cross_entropy distill_cosine_loss distill_jsd_loss dyt embedding fused_add_rms_norm
    fused_linear_cpo_loss fused_linear_cross_entropy fused_linear_jsd fused_linear_orpo_loss
    fused_linear_simpo_loss geglu group_norm jsd kl_div layer_norm llama4_rope multi_token_attention
    relu_squared rms_norm rope softmax sparsemax swiglu tiled_geglu tiled_swiglu tvd""".split()
)
NOTES = {
    "multi_token_attention": "the workspace of cuDNN's convolution was measured too, and is in no peak here",
}
PLAIN = ("huggingface", "torch")


def workloads(file: RowsFile) -> list[Case]:
    """The rows of operations that `scripts/liger_rows.py` has."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    name = f"{row['kernel']} {row['mode']}, {row['x_name']} {row['x']}, {row['gpu'].removeprefix('NVIDIA ')}"
    if row["provider"] not in PLAIN or not row.get("pure_torch", True):
        return Case(
            row=row, name=f"{name}, {row['provider']}", excluded=f"{row['provider']}: not plain PyTorch"
        )
    if row["kernel"] not in OWN_FORMS:
        return Case(row=row, name=name, excluded=f"{row['kernel']} is not rebuilt")
    said = {key: row[key] for key in ("kernel", "mode", "x_name", "x", "config", "timestamp")}
    return Case(
        row=row,
        name=name,
        script="liger_rows.py",
        words=(json.dumps(said),),
        gpu=row["gpu"],
        portable=True,
        note=NOTES.get(row["kernel"], ""),
        resolution_bytes=_resolution_bytes(row["measured_bytes"]),
    )


def _resolution_bytes(measured_bytes: int) -> int:
    """Their figures are single precision numbers of MiB: how far apart two of these are."""
    mantissa_bits = 23
    return 1 << max(0, math.floor(math.log2(measured_bytes)) - mantissa_bits)


SOURCE = Source(
    name="liger_kernel",
    title="Liger-Kernel benchmark data",
    goal="median 0 B, 95 % within 0.1 %",
    goal_percent=0.1,
    workloads=workloads,
)
