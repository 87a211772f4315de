"""Out of memory without a number: the CUDA runtime's own words, and what companions add to them."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.device import explain_device
from memfit.analysis.explanations.full import phase_line
from memfit.analysis.explanations.situation import situation_of
from memfit.analysis.explanations.wording import numbers, process_list, where_of
from memfit.analysis.findings import Advice, Confidence, Finding
from memfit.core.units import MIB, format_bytes
from memfit.formats.messages import Message
from memfit.formats.messages_devices import Device, Process

NEARLY_FULL = 0.9
LEAST_HIDDEN_BYTES = 512 * MIB


def explain_bare(message: Message, clues: Clues) -> Finding:
    """The finding for a message that only says that memory ran out."""
    stray = stray_ranks(clues.processes)
    if stray:
        return _strays(message, stray)
    if situation_of(message, clues).requested_bytes is not None:
        return explain_device(message, clues)
    return _held(message, clues) or _unknown(message, clues)


def stray_ranks(processes: Sequence[Process]) -> dict[str, list[Process]]:
    """By GPU: processes that hold a little of it while they work on another."""
    homes: dict[int, Process] = {}
    for process in processes:
        if process.pid is not None and process.used_bytes is not None:
            best = homes.get(process.pid)
            if best is None or process.used_bytes > (best.used_bytes or 0):
                homes[process.pid] = process
    found: dict[str, list[Process]] = {}
    for process in processes:
        home = homes.get(process.pid if process.pid is not None else -1)
        if home is not None and home.gpu != process.gpu:
            found.setdefault(process.gpu, []).append(process)
    return found


def _strays(message: Message, stray: dict[str, list[Process]]) -> Finding:
    gpu, processes = max(stray.items(), key=lambda item: sum(p.used_bytes or 0 for p in item[1]))
    sizes = [process.used_bytes or 0 for process in processes]
    pids = numbers(process.pid or 0 for process in processes)
    if len(set(sizes)) == 1:
        amount = f"{len(sizes)} x {sizes[0] / MIB:.0f} = {sum(sizes) / MIB:.0f} MiB"
    else:
        amount = f"{' + '.join(f'{size / MIB:.0f}' for size in sizes)} = {sum(sizes) / MIB:.0f} MiB"
    listed = ", ".join(str(process.pid) for process in processes)
    return Finding(
        rule="stray_contexts",
        verdict="other_process",
        severity="error",
        confidence="high",
        summary=f"this job's own other ranks hold {amount} on GPU {gpu}",
        evidence=(
            f"pids {listed} appear on GPU {gpu} and also on their own GPU",
            f"they hold {amount} of GPU {gpu}: {process_list(processes)}",
            "a checkpoint that is loaded without map_location goes to the device that it was saved from, "
            "GPU 0 as "
            "a rule, and every rank then opens a context there",
            f"the error itself is a bare one ({message.form}) that has no sizes"
            if not message.sizes
            else f"the error asked for {format_bytes(message.sizes.get('requested', 0))}",
        ),
        bytes=sum(sizes),
        where=f"GPU {gpu}, pids {pids}",
        advice=(
            remedies.load_on_cpu(),
            Advice(
                action="or let each rank see its own GPU only",
                typed="CUDA_VISIBLE_DEVICES=$LOCAL_RANK python train.py   # per process",
                kind="shell",
                risks="some collective libraries want to see all GPUs",
            ),
        ),
    )


def _held(message: Message, clues: Clues) -> Finding | None:
    """A full GPU beside a bare message."""
    named = message.words.get("gpu")
    full = [device for device in clues.devices if _is_full(device) and named in (None, device.index)]
    if not full:
        return None
    device = full[0]
    used, total = device.used_bytes or 0, device.total_bytes or 0
    own = [process for process in clues.processes if process.gpu in (device.index, "")]
    several = len(own) > 1
    hidden = used - sum(process.used_bytes or 0 for process in own)
    return Finding(
        rule="cuda_error",
        verdict="other_process" if several else "device_full",
        severity="error",
        confidence="medium",
        summary=f"GPU {device.index} is full: {format_bytes(used)} of {format_bytes(total)}",
        evidence=(
            f"nvidia-smi shows {format_bytes(used)} of {format_bytes(total)} in use on GPU {device.index}",
            *([f"processes there: {process_list(own)}"] if own else []),
            *(
                [f"{format_bytes(hidden)} is held by processes that it does not list (of the host)"]
                if hidden > LEAST_HIDDEN_BYTES
                else []
            ),
            f"the error itself ({message.form}) has no sizes",
        ),
        bytes=used,
        where=where_of(message),
        advice=(
            *((remedies.free_processes(tuple(p.pid for p in own if p.pid), None),) if own else ()),
            remedies.another_gpu(),
            remedies.snapshot(),
            remedies.dry_run(),
        ),
    )


def _is_full(device: Device) -> bool:
    return bool(device.total_bytes) and (device.used_bytes or 0) >= NEARLY_FULL * (device.total_bytes or 0)


def _unknown(message: Message, clues: Clues) -> Finding:
    shown = [
        f"nvidia-smi shows {format_bytes(device.used_bytes)} of {format_bytes(device.total_bytes)} in use "
        f"on GPU "
        f"{device.index}: not full at that time"
        for device in clues.devices
        if device.total_bytes and device.used_bytes is not None
    ]
    old = message.form.startswith("0.")
    late = (
        "the failing line may be wrong, because errors of CUDA arrive asynchronously"
        if not old
        else "the format is PyTorch's before 1.0, which gave no sizes"
    )
    return Finding(
        rule="cuda_error",
        verdict="unknown",
        severity="error",
        confidence="medium",
        summary="out of memory was reported by the CUDA runtime; sizes are unknown",
        evidence=(
            f"the text is a bare message ({message.form}): it says that a call got no memory, not how much "
            f"was "
            "asked for or who holds the rest",
            late,
            *shown[:4],
            *phase_line(message),
        ),
        where=where_of(message),
        advice=(
            remedies.find_processes(message),
            *(() if old else (remedies.blocking_launch(),)),
            remedies.snapshot(),
        ),
    )


_STATUS_NOTES = {
    "ALLOC_FAILED": "the library could not get memory of its own: it allocates outside PyTorch's cache, "
    "which may "
    "have taken all of the device",
    "NOT_INITIALIZED": "creating the library's handle failed: too little free memory is the usual reason",
    "INTERNAL_ERROR": "an internal error of the library: too little free memory for its workspace is one "
    "reason of "
    "several",
    "EXECUTION_FAILED": "a kernel of the library failed: an index out of range or an earlier fault is the "
    "usual reason",
    "NOT_SUPPORTED": "the library has no algorithm for these tensors (layout, type, or more than 2^31 "
    "elements)",
    "BAD_PARAM": "the library got parameters that it cannot use",
    "MAPPING_ERROR": "the library could not map its memory; an earlier fault is the usual reason",
}
_LIBRARIES = {
    "CUBLAS": "cuBLAS",
    "CUDNN": "cuDNN",
    "CUSOLVER": "cuSOLVER",
    "CUSPARSE": "cuSPARSE",
    "CUFFT": "cuFFT",
}
_MEMORY_STATUSES = ("ALLOC_FAILED", "NOT_INITIALIZED", "INTERNAL_ERROR")


def explain_status(message: Message, clues: Clues) -> Finding:
    """A status of cuBLAS, cuDNN and the like."""
    status, library = (
        message.words["status"],
        _LIBRARIES.get(message.words["library"], message.words["library"]),
    )
    note = _STATUS_NOTES.get(status, f"the library answered {status}")
    fault = next((m for m in clues.messages if m.kind in ("device-assert", "illegal-access")), None)
    nan_index = "an index out of range in a kernel before it (labels, token ids) gives the same symptom"
    if fault is not None or status not in _MEMORY_STATUSES:
        return Finding(
            rule="library_status",
            verdict="not_memory",
            severity="error",
            confidence="high" if fault is not None else "medium",
            summary=f"{library} failed ({status}), and memory is not the reason",
            evidence=(
                note,
                *(["the log has a fault of a kernel beside it, which comes first"] if fault else []),
            ),
            where=where_of(message),
            advice=(remedies.blocking_launch(), _on_cpu()),
        )
    sure: Confidence = "medium" if status == "ALLOC_FAILED" else "low"
    return Finding(
        rule="library_status",
        verdict="device_full" if status == "ALLOC_FAILED" else "unknown",
        severity="error",
        confidence=sure,
        summary=f"{library} got no memory for itself ({status})"
        if status == "ALLOC_FAILED"
        else f"{library} failed to start or to run ({status}): too little free memory is the usual reason",
        evidence=(note, nan_index, "the message has no sizes", *phase_line(message)),
        where=where_of(message),
        advice=(_leave_room(), remedies.find_processes(message), remedies.blocking_launch(), _on_cpu()),
    )


def _leave_room() -> Advice:
    return Advice(
        action="leave room beside PyTorch's cache, early in the program; a smaller batch does the same",
        typed="torch.cuda.set_per_process_memory_fraction(0.9)",
        kind="python",
        cost="PyTorch runs out a little earlier, with a message that has numbers",
    )


def _on_cpu() -> Advice:
    return Advice(
        action="run one step on the CPU: an index out of range is then named",
        typed="model.cpu()(batch.cpu())",
        kind="python",
        cost="slow: for finding the reason only",
    )


def explain_nccl(message: Message, clues: Clues) -> Finding:
    """NCCL's buffers are outside PyTorch's allocator."""
    asked = message.sizes.get("requested")
    size = "" if asked is None else f" ({format_bytes(asked)} were asked for)"
    return Finding(
        rule="nccl",
        verdict="device_full",
        severity="error",
        confidence="medium",
        summary=f"NCCL got no memory for its buffers{size}: the GPU is full",
        evidence=(
            "NCCL allocates outside PyTorch's cache: 0.5 to 0.7 GB per communicator, by reports",
            "PyTorch's cache may hold free memory that NCCL cannot take",
            *(
                [f"{format_bytes(asked)} is small: the device had next to nothing left"]
                if asked and asked < 1 << 28
                else []
            ),
        ),
        bytes=asked,
        where=where_of(message),
        advice=(
            _leave_room(),
            Advice(
                action="use fewer process groups, or smaller buffers",
                typed="export NCCL_BUFFSIZE=2097152",
                kind="shell",
                cost="slower collectives on large messages",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
            ),
            Advice(
                action="give the cache back once, right before the groups are made",
                typed="torch.cuda.empty_cache()",
                kind="python",
                cost="the next allocations call cudaMalloc again",
            ),
        ),
    )
