"""Measures a training step by PyTorch's own allocator, in a process on the made-up GPU or a real one."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.cost_mode import CostMode
from memfit.capture.graph import StepGraph
from memfit.capture.step import TrainingStep, build_step
from memfit.capture.tracker import StepTracker
from memfit.capture.true_values import true_values
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU, find_gpu
from memfit.dryrun.places import is_out_of_memory, oom_value

STEPS = 3
_COUNTERS = {
    "requested": "requested_bytes.all.peak",
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}


@dataclass(kw_only=True)
class _Peaks:
    """Peak bytes of one step: overall, and requested bytes by phase."""

    overall: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    by_phase: dict[str, int] = field(default_factory=dict)
    phase: str | None = None

    def on_phase(self, phase: str | None) -> None:
        """Closes the phase that ran and begins the next; the allocator's peak counters are read and reset."""
        statistics = torch.cuda.memory_stats()
        if self.phase is not None:
            now = {name: int(statistics[counter]) for name, counter in _COUNTERS.items()}
            self.overall = {name: max(self.overall[name], now[name]) for name in _COUNTERS}
            self.by_phase[self.phase] = max(self.by_phase.get(self.phase, 0), now["requested"])
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase


def measure(
    workload: Mapping[str, Any],
    *,
    gpu_key: str,
    steps: int = STEPS,
    micro_batches: int = 1,
    empty_cache: bool = False,
    costs: bool = True,
    categories: bool = False,
    trace_path: str | None = None,
    answers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Builds the workload on ``cuda`` and measures its step as it is, without techniques: `measure_step`.

    Args:
        workload: a reference of `memfit.capture.workloads.workload_reference`.
        gpu_key: the GPU that this process is on, as `memfit.core.devices.find_gpu` takes it.
        answers: by place, other answers than the expected ones where values are read that are not known.
    """
    started = time.monotonic()
    gpu = find_gpu(gpu_key)
    with true_values(answers) as uncertain:
        with out_of_memory_as_value(phase="init") as caught:
            step = build_step(from_reference(workload), device="cuda", micro_batches=micro_batches)
        if caught:
            result = _empty_result(caught[0])
        else:
            result = measure_step(
                step,
                gpu=gpu,
                steps=steps,
                empty_cache=empty_cache,
                costs=costs,
                categories=categories,
                trace_path=trace_path,
            )
    account = device_account(gpu, result) | uncertain.to_json()
    return result | account | {"wall_seconds": time.monotonic() - started}


def measure_step(
    step: TrainingStep,
    *,
    gpu: GPU,
    steps: int = STEPS,
    empty_cache: bool = False,
    costs: bool = True,
    categories: bool = False,
    trace_path: str | None = None,
) -> dict[str, Any]:
    """Runs a built step, on which techniques may have been put, and gives the figures of the last run.

    Args:
        gpu: for predicted times.
        steps: optimizer steps to run; from the second on the optimizer's state exists.
        empty_cache: gives cached memory back before the last step, so that its reserved peak owes nothing to
            the steps before.
        costs: run one more step to count FLOPs and predict its seconds.
        categories: run one more step under the tracker, to tell what is alive at the peak.
        trace_path: save that step's trace there (implies ``categories``).

    Returns:
        JSON with the keys of `memfit.dryrun.result.DryRunResult` that a step has, and ``phase_peaks``
        (requested bytes), ``resting_bytes``, ``flops``, ``recompute_flops``, ``step_seconds``,
        ``seconds_by_phase``. Out of memory is the value ``oom``, the peaks then being those that were
        reached.
    """
    peaks, result = _Peaks(), _empty_result(None)
    for number in range(steps):
        peaks = _Peaks()
        gc.collect()  # a first compiled step leaves reference cycles that hold tensors
        if empty_cache and number == steps - 1:
            torch.cuda.empty_cache()
        resting = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        with out_of_memory_as_value(peaks=peaks) as caught:
            step.run(peaks.on_phase)
        peaks.on_phase(None)
        result |= {f"peak_{name}_bytes": value for name, value in peaks.overall.items()}
        result |= {"phase_peaks": peaks.by_phase, "resting_bytes": resting}
        result["step_peaks"].append(peaks.overall["requested"])
        if caught:
            return result | {"oom": caught[0]}
        result["steps_done"] += 1
    with out_of_memory_as_value() as caught:  # these steps need no more memory, but fragmentation may differ
        if costs:
            result |= predict_costs(step, gpu)
        if categories or trace_path is not None:
            result |= _compose(StepTracker(step).run(), peaks.overall["requested"], trace_path)
    return result


def predict_costs(step: TrainingStep, gpu: GPU) -> dict[str, Any]:
    """One more run of ``step``, its operators counted: FLOPs, and seconds by the roofline of ``gpu``."""
    mode = CostMode(gpu, device=step.device.type)
    with mode:
        step.run(mode.on_phase)
    return {
        "flops": mode.flops,
        "recompute_flops": mode.flops_by_phase.get("recompute", 0),
        "step_seconds": mode.seconds,
        "seconds_by_phase": dict(mode.seconds_by_phase),
        "op_count": mode.op_count,
    }


def capture_reference(
    workload: Mapping[str, Any], *, device: str = "cuda", micro_batches: int = 1, size: str = "full"
) -> dict[str, Any]:
    """The `StepGraph` of a referenced workload as JSON, captured in this process with true values."""
    with true_values():
        step = build_step(
            from_reference(workload),
            device=device,
            size="small" if size == "small" else "full",
            micro_batches=micro_batches,
        )
        for _ in range(STEPS - 1):
            step.run()
        return StepTracker(step).run().to_json()


@contextmanager
def out_of_memory_as_value(*, peaks: _Peaks | None = None, phase: str = "") -> Any:
    """Yields a list that gets the out-of-memory error raised inside, as JSON of `OutOfMemory`."""
    caught: list[dict[str, Any]] = []
    asked: list[dict[str, int]] = []

    def observe(device: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        asked.append(
            {
                "asked_bytes": asked_bytes,
                "free_bytes": free_bytes,
                "reserved_bytes": torch.cuda.memory_reserved(),
            }
        )

    if torch.cuda.is_available():
        torch.cuda.init()
        torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]
    try:
        yield caught
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        exact = asked[-1] if asked else {}
        caught.append(oom_value(problem, phase=(peaks.phase if peaks else None) or phase, **exact))


def _compose(graph: StepGraph, peak_requested_bytes: int, trace_path: str | None) -> dict[str, Any]:
    """What is alive at the peak; what no operator's result accounts for are the libraries' workspaces."""
    by_category = graph.by_category()
    workspace = peak_requested_bytes - graph.peak_bytes
    if workspace > 0:
        by_category["workspace"] = by_category.get("workspace", 0) + workspace
    if trace_path is not None:
        graph.to_trace().save(trace_path)
    return {
        "peak_by_category": by_category,
        "saved_bytes": graph.saved_bytes,
        "event_count": graph.event_count,
    }


def _empty_result(oom: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "engine": "dryrun",
        "torch": torch.__version__,
        "peak_requested_bytes": 0,
        "peak_allocated_bytes": 0,
        "peak_reserved_bytes": 0,
        "oom": oom,
        "steps_done": 0,
        "step_peaks": [],
        "phase_peaks": {},
    }


def device_account(gpu: GPU, result: Mapping[str, Any]) -> dict[str, Any]:
    """The device's whole account: beside PyTorch's segments, the context and the libraries' own memory."""
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return {
        "gpu": gpu.key,
        "context_bytes": gpu.context_bytes,
        "device_total_bytes": beside + int(result["peak_reserved_bytes"]),
        "nvml_total_bytes": gpu.nvml_total_bytes,
        "runtime_total_bytes": gpu.runtime_total_bytes,
    }
