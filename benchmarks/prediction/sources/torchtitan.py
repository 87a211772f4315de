"""torchtitan's measurements of Llama 3.1 on 8 to 512 H100s: the fullest ranks of each job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_rows import GPU
from torchtitan_rows import Case as Job

from prediction.case import Case, RowsFile, Source

PRINTED_BYTES = (1 << 30) // 10


def workloads(file: RowsFile) -> list[Case]:
    """The ranks that count of each row's job."""
    return [_case(row) for row in file.rows]


def _case(row: Mapping[str, Any]) -> Case:
    name = f"{row['model']}, {row['gpus']} GPUs, {row['local_batch']} × {row['seq']}, {row['technique']}"
    job = Job.of(row)
    return Case(
        row=row,
        name=name,
        script=f"../../{job.script.name}",
        words=job.words,
        gpu=GPU,
        counter="reserved",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},  # as torchtitan's launcher sets it
        world_size=job.gpus,
        ranks=job.ranks,
        note=job.differs or "PyTorch of 2024-12 and nccl's version then; torchtitan's own code",
        resolution_bytes=PRINTED_BYTES,
    )


SOURCE = Source(
    name="torchtitan",
    title="torchtitan Llama 3.1 H100 benchmark, Dec 2024",
    goal="5 %",
    goal_percent=5.0,
    workloads=workloads,
)
