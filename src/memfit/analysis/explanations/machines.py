"""Outputs of nvidia-smi on their own: what a job here can have, and what is not known."""

from __future__ import annotations

import re

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.bare import stray_ranks
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.wording import process_list
from memfit.analysis.findings import Advice, Finding
from memfit.core.units import MIB, format_bytes
from memfit.formats.messages_devices import Device, Slice

REASONS = {
    "Insufficient Permissions": "the driver does not let this user or container see it; inside a container "
    "with one "
    "slice of a partitioned GPU (MIG) that is the rule",
    "N/A": "the driver has no value: unified memory (GB10, Jetson), a MIG-partitioned or a virtual GPU",
    "Not Supported": "this device has no memory of its own to report (unified memory), or an old driver",
    "Unknown Error": "the driver failed to read it; the GPU may need a reset",
    "GPU is lost": "the GPU has fallen off the bus",
    "ERR!": "the driver failed to read it; the GPU may need a reset",
}
UNIFIED = re.compile(r"\b(GB10|Jetson|Orin|Xavier|Thor)\b", re.IGNORECASE)
"""Names of devices that share the host's memory."""
NEARLY_FULL = 0.9


def explain_machine(clues: Clues) -> list[Finding]:
    """Findings about the GPUs that outputs of nvidia-smi show, where no message asks for more."""
    findings = [finding for device in clues.devices for finding in _device(device, clues)]
    stray = stray_ranks(clues.processes)
    for gpu, processes in stray.items():
        size = sum(process.used_bytes or 0 for process in processes)
        findings.append(
            Finding(
                rule="stray_contexts",
                verdict="other_process",
                severity="warning",
                confidence="medium",
                summary=f"processes of other GPUs hold {format_bytes(size)} on GPU {gpu}",
                evidence=(f"they appear there and on their own GPU: {process_list(processes)}",),
                bytes=size,
                where=f"GPU {gpu}",
                advice=(remedies.load_on_cpu(),),
            )
        )
    if not findings and clues.processes:
        findings.append(_processes(clues))
    return findings


def _device(device: Device, clues: Clues) -> list[Finding]:
    findings = [_slice(device, part) for part in device.slices]
    if device.total_bytes is None and device.free_bytes is None and device.used_bytes is None:
        if not device.slices:
            findings.append(_unknown(device))
    elif not device.slices:
        findings.append(_known(device, clues))
    return findings


def _title(device: Device) -> str:
    name = f" ({device.name})" if device.name else ""
    return f"GPU {device.index}{name}" if device.index else f"the GPU{name}"


def _unknown(device: Device) -> Finding:
    reason = next(
        (device.unknown[key] for key in ("total", "used", "free", "memory") if key in device.unknown), ""
    )
    evidence = [f"nvidia-smi answered [{reason}]: {REASONS.get(reason, 'no amount')}"]
    evidence.append("unknown is not 0, and the size in the product's name is not what a job here can use")
    if device.temperature_celsius is not None:
        evidence.append(f"temperature {device.temperature_celsius} C")
    evidence.append(
        f"utilization {device.utilization_percent} %"
        if device.utilization_percent is not None
        else f"utilization unknown [{device.unknown['utilization']}]"
        if "utilization" in device.unknown
        else "utilization is not in the output"
    )
    return Finding(
        rule="device_memory_unknown",
        verdict="unknown",
        severity="warning",
        confidence="high",
        summary=f"the memory of {_title(device)} is unknown: {reason or 'not shown'}",
        evidence=tuple(evidence),
        where=_title(device),
        advice=(
            _where_else(device, reason),
            Advice(
                action="or ask the runtime from inside the job",
                typed='python -c "import torch; print(torch.cuda.mem_get_info())"',
                kind="shell",
                cost="a CUDA context for a moment",
            ),
        ),
    )


def _where_else(device: Device, reason: str) -> Advice:
    """Where the number is to be had."""
    if reason == "Not Supported" or UNIFIED.search(device.name):
        return Advice(
            action="on a GPU with unified memory the host's memory is the budget: see what is available",
            typed="free -h; grep MemAvailable /proc/meminfo",
            kind="shell",
        )
    return Advice(
        action="ask for the slices: their own numbers are in the XML",
        typed="nvidia-smi -q -x | grep -A8 '<mig_device>'; nvidia-smi -L; free -h",
        kind="shell",
    )


def _slice(device: Device, part: Slice) -> Finding:
    if part.total_bytes is None:
        amount = "is unknown"
    else:
        amount = f"is {part.total_bytes / MIB:.0f} MiB in total"
        if part.used_bytes is not None:
            amount += f", {part.used_bytes / MIB:.0f} used"
        amount += f", {part.free_bytes / MIB:.0f} free" if part.free_bytes is not None else ", free not given"
    named = re.search(r"(\d{2,3})\s?GB", device.name)
    evidence = [f"memory of {part.label} {amount}"]
    if part.total_bytes is not None:
        evidence.append(f"the budget of a job here is {part.total_bytes / MIB:.0f} MiB")
    if named is not None:
        evidence.append(f"the product's name ({device.name}) is the whole card's, not the slice's")
    if "total" in device.unknown:
        evidence.append(f"the whole GPU's memory is refused [{device.unknown['total']}]")
    return Finding(
        rule="mig_slice",
        verdict="misreported_capacity",
        severity="info",
        confidence="high",
        summary=f"a job here has {part.label} of {_title(device)}, not the whole card",
        evidence=tuple(evidence),
        bytes=part.total_bytes,
        where=f"GPU {device.index}, {part.label}",
        advice=(
            Advice(
                action="plan for the slice",
                typed=f"memfit fit train.py:workload --gpu GPU --budget {(part.total_bytes or 0) // MIB}MiB",
                kind="shell",
            ),
        )
        if part.total_bytes
        else (),
    )


def _known(device: Device, clues: Clues) -> Finding:
    used, total, free = device.used_bytes, device.total_bytes, device.free_bytes
    shown = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in (("total", total), ("used", used), ("free", free))
        if size is not None
    )
    own = [process for process in clues.processes if process.gpu in (device.index, device.uuid)]
    known = sum(process.used_bytes or 0 for process in own)
    evidence = [shown]
    if own:
        evidence.append(f"processes: {process_list(own)}")
    if used is not None and own and used - known > 512 * MIB:
        evidence.append(f"{format_bytes(used - known)} more is used than the listed processes hold")
    if used is not None and not own and used > 1024 * MIB:
        evidence.append("no process is listed: nvidia-smi in a container does not see those of the host")
    if device.mode and device.mode not in ("Default", "N/A"):
        evidence.append(f"compute mode: {device.mode}")
    if used is None and free is None:
        reason = device.unknown.get("used") or device.unknown.get("free") or "not shown"
        evidence.append(f"how much of it is used is unknown [{reason}], which is not 0")
    held = used if used is not None or total is None or free is None else total - free
    full = bool(total) and held is not None and total is not None and held > NEARLY_FULL * total
    how = "is nearly full" if full else "is not full" if held is not None else "is there, how full is unknown"
    return Finding(
        rule="device_memory",
        verdict="device_full" if full else "unknown",
        severity="warning" if full else "info",
        confidence="high",
        summary=f"{_title(device)} {how}; there is no error in the input",
        evidence=tuple(evidence),
        bytes=used,
        where=_title(device),
        advice=(Advice(action="give the error's text, too: memfit explain error.txt nvidia-smi.txt"),),
    )


def _processes(clues: Clues) -> Finding:
    by_gpu: dict[str, int] = {}
    for process in clues.processes:
        if process.used_bytes is not None:
            by_gpu[process.gpu] = by_gpu.get(process.gpu, 0) + process.used_bytes
    unknown = sum(process.used_bytes is None for process in clues.processes)
    evidence = [f"GPU {gpu or '?'}: {format_bytes(size)}" for gpu, size in by_gpu.items()]
    if unknown:
        evidence.append(
            f"{unknown} of them: unknown, which is not 0 (Windows, WSL and some containers hide it)"
        )
    return Finding(
        rule="device_processes",
        verdict="unknown",
        severity="info",
        confidence="high",
        summary=f"{len(clues.processes)} process(es) on GPUs; there is no error in the input",
        evidence=tuple(evidence),
        advice=(Advice(action="give the error's text, too"),),
    )
