"""Apple's measurements of cut cross entropy beside plain PyTorch: one operation's memory above its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prediction.case import Case, RowsFile, Source

WORDS = {"baseline": (), "torch_compile": ("--compile",)}
OTHER_CODE = (
    "PyTorch 2.14 compiles another backward pass than 2.4 did: run here, it takes 1,162 MB above what is "
    "there before (the gradients of both inputs), where 2.4's took 12,000"
)
MB = 1 << 20  # their figures are whole MB of 2**20


def workloads(file: RowsFile) -> list[Case]:
    """The rows of plain PyTorch, and of the same compiled."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    name = f"{row['impl']} {row['kind']}"
    if row["impl"] not in WORDS:
        return Case(row=row, name=name, excluded="their own Triton kernel, which is not part of PyTorch")
    if row["impl"] == "torch_compile" and row["kind"] != "fw":
        return Case(row=row, name=name, excluded=OTHER_CODE)
    return Case(
        row=row,
        name=name,
        script="linear_cross_entropy.py",
        words=(row["kind"], *WORDS[row["impl"]]),
        gpu="a100-80gb",
        portable=row["impl"] == "baseline",
        resolution_bytes=MB,
    )


SOURCE = Source(
    name="apple_cce",
    title="Cut Cross-Entropy benchmark output",
    goal="1 %",
    goal_percent=1.0,
    workloads=workloads,
)
