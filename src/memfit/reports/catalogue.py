"""The GPU catalogue as a table, and as JSON with the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.core.catalogue import CATALOGUE
from memfit.core.devices import GPU
from memfit.core.units import GIB

SCHEMA_VERSION = 1


def catalogue_json() -> dict[str, Any]:
    """All GPUs: sizes in bytes, rates in bytes and FLOP per second, and where each figure is from."""
    return {"schema_version": SCHEMA_VERSION, "gpus": [_gpu_json(gpu) for gpu in CATALOGUE.values()]}


def _gpu_json(gpu: GPU) -> dict[str, Any]:
    values = {column.name: getattr(gpu, column.name) for column in fields(gpu)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {**plain, "default_budget_bytes": gpu.default_budget_bytes}


def catalogue_table() -> RenderableType:
    """One row a GPU: the name to give, the memory, and what the predictions of time use."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("--gpu", no_wrap=True, style="bold")
    table.add_column("name", overflow="fold")
    for heading in ("arch", "memory GiB", "budget GiB", "GB/s", "fp32", "bf16"):
        table.add_column(heading, justify="right")
    for gpu in CATALOGUE.values():
        table.add_row(
            gpu.key,
            gpu.name,
            gpu.architecture,
            f"{gpu.nvml_total_bytes / GIB:.2f}",
            f"{gpu.default_budget_bytes / GIB:.2f}",
            f"{gpu.bandwidth_bytes_per_second / 1e9:,.0f}",
            _teraflops(gpu, "fp32"),
            _teraflops(gpu, "bf16"),
        )
    note = (
        "memory: the total that nvidia-smi shows. budget: what fit uses when no --budget is given. "
        "fp32, bf16: dense TFLOP/s. Any other GPU can be described: --gpu 24GiB,sm89. "
        "The source of each figure: memfit gpus --json."
    )
    return Group(table, Text(note, style="dim"))


def _teraflops(gpu: GPU, dtype: str) -> str:
    return f"{gpu.peak_flops[dtype] / 1e12:,.0f}" if dtype in gpu.peak_flops else "–"
