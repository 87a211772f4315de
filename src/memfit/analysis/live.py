"""This process as a case: its allocator's counters, the device, and tensors that are kept by mistake."""

from __future__ import annotations

import os
import sys
from typing import Any

from memfit.analysis.configuration import Configuration, environment_configuration
from memfit.analysis.evidence import Evidence, GpuUsage, Kept
from memfit.core.recording import Recording


def live_evidence() -> Evidence:
    """What this process tells. torch is used only if the process has loaded it; CUDA is never started."""
    configuration = environment_configuration(os.environ)
    torch = sys.modules.get("torch")
    if torch is None:
        return Evidence(configuration=configuration, own_pids=frozenset({os.getpid()}))
    configuration = Configuration(torch=str(torch.__version__)).merged(configuration)
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Evidence(
        recording=_recording(torch) if started else None,
        configuration=configuration,
        statistics=(_statistics(torch),) if started else (),
        gpus=(_usage(torch),) if started else (),
        own_pids=frozenset({os.getpid()}),
        kept=kept_tensors(),
    )


def kept_tensors() -> tuple[Kept, ...]:
    """Tensors of this process that tracebacks, closures and cycles keep; cycles are collected."""
    from memfit.pools import collect

    collection = collect()
    return tuple(
        Kept(keeper=found.keeper, size_bytes=found.size_bytes, text=str(found))
        for found in (*collection.kept, *collection.freed)
    )


def _statistics(torch: Any) -> dict[str, int]:
    return {key: int(value) for key, value in torch.cuda.memory_stats().items()}


def _usage(torch: Any) -> GpuUsage:
    free, total = torch.cuda.mem_get_info()
    return GpuUsage(gpu=str(torch.cuda.current_device()), used_bytes=total - free, total_bytes=total)


def _recording(torch: Any) -> Recording | None:
    """What the allocator holds, with its history where the process records one."""
    from memfit.formats.snapshots import from_value

    value = torch.cuda.memory._snapshot()
    if not value.get("segments") and not any(value.get("device_traces", ())):
        return None
    return from_value(value, name="this process", size_bytes=1 << 40)
