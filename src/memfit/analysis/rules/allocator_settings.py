"""The allocator's settings as a text that rules change, and why expandable segments may not be turned on."""

from __future__ import annotations

import re

from memfit.allocators.candidates import VARIABLE, shell_line
from memfit.analysis.configuration import Configuration
from memfit.analysis.evidence import Evidence
from memfit.analysis.findings import Advice

FIRST_TORCH_WITH_EXPANDABLE = (2, 1)
FIRST_TORCH_WITH_GRAPHS = (2, 15)
"""Expandable segments were off for CUDA graphs before (pytorch#194767)."""
EXPANDABLE = "expandable_segments:True"


def without_key(settings: str, key: str) -> str:
    """The settings without one key, whose value may be a list in brackets."""
    rest = re.sub(rf"\b{re.escape(key)}\s*:\s*(\[[^\]]*\]|[^,]*)", "", settings)
    return ",".join(part for part in re.split(r",(?![^\[]*\])", rest) if part.strip())


def with_setting(settings: str, text: str) -> str:
    """The settings with one key set to a value (``"key:value"``), whatever they said of it before."""
    rest = without_key(settings, text.partition(":")[0])
    return f"{rest},{text}" if rest else text


def torch_version(configuration: Configuration) -> tuple[int, int] | None:
    """Major and minor of the job's torch; ``None`` where it is not known."""
    match = re.match(r"(\d+)\.(\d+)", configuration.torch or "")
    return (int(match[1]), int(match[2])) if match else None


def unsafe_reasons(case: Evidence) -> list[str]:
    """What in a job does not go together with expandable segments, a sentence each."""
    job, version = case.configuration, torch_version(case.configuration)
    reasons = []
    if job.cuda_ipc:
        reasons.append("tensors are shared between processes by CUDA IPC (pytorch#130330)")
    if job.custom_all_reduce:
        reasons.append("custom all-reduce kernels register their buffers by CUDA IPC (vllm#42609)")
    if job.pluggable_allocator:
        reasons.append("a pluggable allocator serves the memory (pytorch#147851)")
    if job.cuda_graphs and (version is None or version < FIRST_TORCH_WITH_GRAPHS):
        reasons.append("CUDA graphs are captured, with which older versions hang or leave it off")
    if version is not None and version < FIRST_TORCH_WITH_EXPANDABLE:
        reasons.append(f"torch {job.torch} does not have it yet")
    if "max_split_size_mb" in case.settings or "max_split_size_mb" in (job.alloc_conf or ""):
        reasons.append("max_split_size_mb is set beside it, which asserts (pytorch#119452)")
    return reasons


def expandable_advice(case: Evidence, *, saving_bytes: int | None) -> Advice:
    """To turn expandable segments on."""
    settings = with_setting(without_key(case.settings, "max_split_size_mb"), EXPANDABLE)
    return Advice(
        action="Let segments grow page by page, so that free memory is not cut up between them.",
        typed=shell_line(settings),
        kind="shell",
        saving_bytes=saving_bytes,
        cost="mapping pages costs a few microseconds where a segment grows; none once the job is warm",
        risks="Set it before the process starts. Not with CUDA IPC, custom all-reduce or a pluggable "
        "allocator; Linux only.",
        source=f"PyTorch's notes on CUDA, {VARIABLE}; replayed on this recording",
    )
