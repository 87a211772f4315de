"""Sample traces of PyTorch's profiler: every allocation of ResNet-50's training steps on a V100."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prediction.case import Case, RowsFile, Source
from prediction.engines import Prediction

GPU = "32GiB,sm75"
NOTE = (
    "at the recorded peak a weight gradient's cuDNN workspace of 56.6 MB is alive (2 % of it), and cuDNN's "
    "workspaces are not in the dry run's peaks; run as sm_75, as PyTorch 2.14 has no kernels for a V100"
)
LARGE_BYTES = 1 << 20  # below this, a batch norm of 2021 counted its batches in a new tensor each time


def workloads(file: RowsFile) -> list[Case]:
    """The steps; how the data was loaded changes only the moment when a batch is dropped."""
    return [_case(row, file.traces / "resnet50_kineto.json.gz") for row in file.rows]


def _case(row: Mapping[str, Any], trace: Path) -> Case:
    return Case(
        row=row,
        name=f"ResNet-50, batch {row['batch']}, {row['num_workers']} workers",
        script="resnet_steps.py",
        words=(str(row["batch"]), *map(str, row["input"])),
        gpu=GPU,
        portable=True,
        note=NOTE,
        remark=partial(_beside_trace, trace, row["allocs_per_step"]),
    )


def _beside_trace(trace: Path, per_step: int, run: Prediction) -> str:
    """Large results of the forward pass, looked for in the recorded step in their order.

    The record has sizes of blocks, and more than our run: workspaces. A block that is not worth splitting is
    up to 1 MiB larger than what was asked for.
    """
    ours = [size for size in (run.details or {})["forward"] if size >= LARGE_BYTES]
    if not trace.exists():
        return ""
    events = json.loads(gzip.decompress(trace.read_bytes()))["events"]
    recorded = iter([size for _, size in events if size > 0][:per_step])
    found = 0
    for size in ours:
        if not any(size <= block <= size + LARGE_BYTES for block in recorded):
            break
        found += 1
    return f"{found} of {len(ours)} large results of the forward pass found in the trace, in order"


SOURCE = Source(
    name="kineto_resnet50",
    title="Kineto TensorBoard plugin sample traces",
    goal="0.5 %, equal sizes of activations",
    goal_percent=0.5,
    workloads=workloads,
)
