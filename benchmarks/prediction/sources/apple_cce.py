"""Apple's measurements of cut cross entropy beside plain PyTorch: one operation's memory above its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

EXCLUDED = {
    "cce": "their own Triton kernel, which is not part of PyTorch",
    "torch_compile": "what is kept depends on the compiler of torch 2.4",
}
MB = 1 << 20  # their figures are whole MB of 2**20


def workloads(file: RowsFile) -> list[Case]:
    """The plain PyTorch rows."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    name = f"{row['impl']} {row['kind']}"
    if row["impl"] != "baseline":
        return Case(row=row, name=name, excluded=EXCLUDED.get(row["impl"], "not a plain PyTorch row"))
    return Case(
        row=row,
        name=name,
        script="linear_cross_entropy.py",
        words=(row["kind"],),
        gpu="a100-80gb",
        portable=True,
        resolution_bytes=MB,
    )


SOURCE = Source(
    name="apple_cce",
    title="Cut Cross-Entropy benchmark output",
    goal="1 % on plain PyTorch rows",
    goal_percent=1.0,
    workloads=workloads,
)
