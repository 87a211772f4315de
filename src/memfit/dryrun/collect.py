"""Making the result of a run from what the probe saw, and writing it down for the launcher."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any, cast

import torch

from memfit.core.files import write_atomically
from memfit.dryrun.absent_ranks import are_absent, group_shapes
from memfit.dryrun.collective_values import sending
from memfit.dryrun.devices import estimates
from memfit.dryrun.frames import place_in_traceback
from memfit.dryrun.measured import Measured, measure_devices, save_traces
from memfit.dryrun.probe import Probe
from memfit.dryrun.result import DryRunResult, Ended, ScriptError

_SNAPSHOT_PROTOCOL = 4  # other viewers read no newer one


def write_result(
    probe: Probe, spec: dict[str, Any], *, ended: str, exit_code: int, error: BaseException | None
) -> None:
    """Write the result, and the trace and snapshot if they were asked for, to where the launcher looks for
    them."""
    gpu = spec["gpu"]
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    meta = {
        "gpu": gpu["key"],
        "torch": torch.__version__,
        "command": spec["command"],
        "allocator_settings": conf,
    }
    measured = measure_devices(probe, gpu, meta, all_of=spec["all_gpus_of"])
    if spec["trace"]:
        save_traces(measured, spec["trace"])
    if spec["snapshot"]:
        content = pickle.dumps(probe.recording.snapshot(), protocol=_SNAPSHOT_PROTOCOL)
        write_atomically(spec["snapshot"], content)
    result = make_result(probe, measured, gpu, ended=cast(Ended, ended), exit_code=exit_code, error=error)
    write_atomically(spec["result"], json.dumps(result.to_json()))


def make_result(
    probe: Probe,
    measured: list[Measured],
    gpu: dict[str, Any],
    *,
    ended: Ended,
    exit_code: int,
    error: BaseException | None,
) -> DryRunResult:
    """The account of what the probe saw; ``wall_seconds`` and the scratch folder are the launcher's to
    add."""
    fullest, history = measured[0].account, measured[0].history
    return DryRunResult(
        gpu=gpu["key"],
        torch=torch.__version__,
        peak_requested_bytes=fullest.peak_requested_bytes,
        peak_allocated_bytes=fullest.peak_allocated_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
        context_bytes=gpu["context_bytes"],
        device_total_bytes=max(gpu["context_bytes"], fullest.device_total_bytes),
        nvml_total_bytes=gpu["nvml_total_bytes"],
        runtime_total_bytes=gpu["runtime_total_bytes"],
        oom=probe.out_of_memory(ended_by=error),
        event_count=len(history.trace),
        value_reads=probe.value_reads(),
        not_modelled=probe.not_modelled(),
        estimates=estimates(),
        wall_seconds=0.0,
        exit_code=exit_code,
        ended=ended,
        steps_done=probe.steps.done,
        step_peaks=history.step_peaks(),
        peak_by_category=fullest.peak_by_category,
        peak_by_phase=history.at_peak("phase"),
        error=None if error is None else _script_error(error),
        devices=tuple(sorted((one.account for one in measured), key=lambda account: account.index)),
        rank=int(os.environ["RANK"]) if are_absent() else None,
        world_size=int(os.environ["WORLD_SIZE"]) if are_absent() else 1,
        groups=group_shapes(frozenset(sending)) if are_absent() else (),
    )


def _script_error(error: BaseException) -> ScriptError:
    place = place_in_traceback(error)
    return ScriptError(
        type=type(error).__name__,
        message=str(error),
        file=place.file if place else None,
        line=place.line if place else 0,
        function=place.function if place else "",
    )
