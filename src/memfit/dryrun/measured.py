"""What a process measured on each of its GPUs: peaks, the device's own account, the history of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.dryrun.accounts import DeviceAccount
from memfit.dryrun.devices import device_account, used_devices
from memfit.dryrun.history import History
from memfit.dryrun.probe import Probe


@dataclass(frozen=True)
class Measured:
    """One GPU, and all that happened on it."""

    account: DeviceAccount
    history: History

    @property
    def trace_suffix(self) -> str:
        """``".cuda1"``: what the trace of a GPU that is not the fullest has in its file's name."""
        return f".cuda{self.account.index}"


def measure_devices(
    probe: Probe, gpu: Mapping[str, Any], meta: Mapping[str, Any], *, all_of: int = 1
) -> list[Measured]:
    """Every GPU that the process used, and the first ``all_of`` in any case, the fullest one first."""
    probe.owners.note_living()
    numbers = sorted({*used_devices(), *range(all_of)}) or [0]
    several = len(numbers) > 1
    found = [_measure(probe, gpu, {**meta, "device": n} if several else meta, n) for n in numbers]
    return sorted(found, key=lambda one: (-one.account.device_total_bytes, one.account.index))


def _measure(probe: Probe, gpu: Mapping[str, Any], meta: Mapping[str, Any], device: int) -> Measured:
    peaks, history = probe.recording.peaks(device), probe.history(device, meta)
    context_bytes = gpu["context_bytes"] if device in used_devices() else 0
    highest = max(peaks["reserved_bytes"], int(device_account(device).get("peak_bytes", 0)))
    account = DeviceAccount(
        index=device,
        peak_requested_bytes=peaks["requested_bytes"],
        peak_allocated_bytes=peaks["allocated_bytes"],
        peak_reserved_bytes=peaks["reserved_bytes"],
        context_bytes=context_bytes,
        device_total_bytes=context_bytes + highest,
        nvml_total_bytes=gpu["nvml_total_bytes"],
        event_count=len(history.trace),
        peak_by_category=history.at_peak("category"),
    )
    return Measured(account, history)


def save_traces(measured: list[Measured], path: str) -> None:
    """The fullest GPU's trace at ``path``; those of others that have events beside it (``run.cuda1.…``)."""
    measured[0].history.trace.save(path)
    file = Path(path)
    for other in measured[1:]:
        if other.account.event_count:
            other.history.trace.save(file.with_name(f"{file.stem}{other.trace_suffix}{file.suffix}"))
