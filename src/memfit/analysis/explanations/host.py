"""The host's memory: RAM, pinned memory and shared memory."""

from __future__ import annotations

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues, hint_lines
from memfit.analysis.explanations.wording import where_of
from memfit.analysis.findings import Advice, Confidence, Finding
from memfit.core.units import GIB, format_bytes
from memfit.formats.messages import Message

FREE_COMMAND = "free -g; dmesg -T | grep -i 'out of memory\\|oom-kill' | tail"


def explain_host(message: Message, clues: Clues) -> Finding:
    """An allocation in RAM failed."""
    asked = message.sizes.get("requested")
    ram = clues.hints.host_total_bytes
    evidence = [f"the message is about the CPU's memory ({message.form or message.framework}), not the GPU's"]
    if "shape" in message.words:
        evidence.append(
            f"an array of shape {message.words['shape']} and type {message.words.get('dtype', '?')}"
        )
    if asked is not None:
        evidence.append(f"{asked:,} bytes = {format_bytes(asked)} were asked for in one piece")
        if ram is not None:
            evidence.append(
                f"the host has {format_bytes(ram)}" + (": it can never fit" if asked > ram else "")
            )
    if message.kind == "tf-host-oom":
        evidence.append(
            f"the tensor was to be on the CPU (allocator {message.words.get('allocator', 'cpu')})"
        )
    size = "" if asked is None else f" for {format_bytes(asked)}"
    return Finding(
        rule="host_memory",
        verdict="host_memory",
        severity="error",
        confidence="high" if message.kind != "host-mmap" else "medium",
        summary=f"the host ran out of memory (RAM){size}",
        evidence=(*evidence, *hint_lines(clues.hints, "ram", "host", "worker", "swap")),
        bytes=asked,
        where=where_of(message),
        advice=tuple(_host_advice(asked)),
    )


def _host_advice(asked: int | None) -> list[Advice]:
    advice = []
    if asked is not None and asked > 4 * GIB:
        advice.append(
            Advice(
                action="do not build it whole: a smaller batch, a part at a time, or a smaller type",
                typed="for part in torch.split(x, 1024): …",
                kind="python",
            )
        )
    advice += [
        Advice(
            action="load weights and data as maps of their files, not as copies in RAM",
            typed="torch.load(path, map_location='cpu', mmap=True)",
            kind="python",
            cost="reads from disk as needed",
        ),
        Advice(
            action="use fewer DataLoader workers, and fewer batches ahead",
            typed="DataLoader(dataset, num_workers=2, prefetch_factor=2)",
            kind="python",
            cost="less overlap of reading with computing",
        ),
        Advice(action="see how much there is, and what else uses it", typed=FREE_COMMAND, kind="shell"),
    ]
    return advice


def explain_killed(message: Message, clues: Clues) -> Finding:
    """The kernel ended a process."""
    certain = message.kind == "oom-killer"
    resident = message.sizes.get("resident")
    words = message.words
    evidence = []
    if certain:
        who = f" (process {words['pid']}, {words['name']})" if "pid" in words else ""
        evidence.append(f"the kernel's out-of-memory killer ended it{who}")
        if message.form == "cgroup":
            evidence.append("the limit is that of a container or a job (cgroup), not of the machine")
    elif message.kind == "worker-killed":
        evidence.append(
            f"a DataLoader worker was killed (pid {words.get('pids', '?')}): the out-of-memory killer, as "
            f"a rule"
        )
    else:
        evidence.append(f"the process was ended by SIGKILL ({message.form}), without a message of its own")
        evidence.append("the out-of-memory killer is the usual sender; a scheduler or a person may be, too")
    if resident is not None:
        evidence.append(f"it held {format_bytes(resident)} of RAM")
    evidence.append("a GPU that is full raises an error in Python; it does not kill the process")
    sure: Confidence = "high" if certain else "medium"
    return Finding(
        rule="host_memory",
        verdict="host_memory",
        severity="error",
        confidence=sure,
        summary="the process was killed for want of the host's memory (RAM)"
        if certain
        else "the process was killed, most likely for want of the host's memory (RAM)",
        evidence=(*evidence, *hint_lines(clues.hints, "ram", "host", "worker", "swap", "memory")),
        bytes=resident,
        where=where_of(message),
        advice=(
            Advice(action="make sure of it", typed=FREE_COMMAND, kind="shell"),
            *_host_advice(None)[:2],
            Advice(
                action="give the container or the job more RAM",
                typed="docker run --memory=64g …   # Slurm: #SBATCH --mem=64G",
                kind="shell",
            ),
            Advice(
                action="let one rank at a time load the model, on the meta device or low_cpu_mem_usage "
                "elsewhere",
                cost="a slower start",
            ),
        ),
    )


def explain_shared(message: Message, clues: Clues) -> Finding:
    """/dev/shm is full."""
    shm = clues.hints.shm_bytes or clues.fact_size("shm-size", "total")
    nccl = message.framework == "nccl"
    evidence = [
        "DataLoader workers hand over batches through /dev/shm; a page that it has no room for is a bus error"
        if not nccl
        else "NCCL's ranks of one host talk through /dev/shm",
        "in a container /dev/shm has 64 MB unless told otherwise",
    ]
    if shm is not None:
        evidence.append(f"/dev/shm has {format_bytes(shm)} here")
    if message.words.get("pids"):
        evidence.append(f"worker {message.words['pids']} died")
    direct = message.kind == "shm-full" or message.framework == "pytorch" or shm is not None
    return Finding(
        rule="shared_memory",
        verdict="shared_memory",
        severity="error",
        confidence="high" if direct else "medium",
        summary="shared memory (/dev/shm) is full; neither the GPU's memory nor RAM as such is",
        evidence=(*evidence, *hint_lines(clues.hints, "worker", "batch", "prefetch", "shm")),
        bytes=message.sizes.get("requested"),
        where=where_of(message),
        advice=(
            remedies.shm_size(message.sizes.get("requested")),
            Advice(
                action="on a host of your own: make it larger",
                typed="mount -o remount,size=16G /dev/shm",
                kind="shell",
            ),
            Advice(
                action="or hold fewer batches there",
                typed="DataLoader(dataset, num_workers=2, prefetch_factor=2)",
                kind="python",
                cost="less overlap of reading with computing",
            ),
            Advice(
                action="or hand over through files",
                typed="torch.multiprocessing.set_sharing_strategy('file_system')",
                kind="python",
                risks="files may be left over when a process is killed",
            ),
            Advice(action="see how full it is while the job runs", typed="df -h /dev/shm", kind="shell"),
        ),
    )


def explain_pinned(message: Message, clues: Clues) -> Finding:
    """Page-locked memory of the host."""
    asked = message.sizes.get("requested")
    return Finding(
        rule="pinned_memory",
        verdict="host_memory",
        severity="error",
        confidence="medium",
        summary="the host gave no pinned (page-locked) memory"
        + ("" if asked is None else f" for {format_bytes(asked)}"),
        evidence=(
            "the failing call pins memory of the host; CUDA reports that as out of memory, too",
            "WSL and some containers allow little of it, whatever the RAM (ulimit -l)",
        ),
        bytes=asked,
        where=where_of(message),
        advice=(
            Advice(
                action="do not pin",
                typed="DataLoader(dataset, pin_memory=False)",
                kind="python",
                cost="slower copies to the GPU",
            ),
            Advice(
                action="or allow more: the limit of locked memory, and WSL's memory in .wslconfig",
                typed="ulimit -l unlimited",
                kind="shell",
            ),
        ),
    )
