"""Memory of the host that ran out: RAM, pinned and shared memory, and the kernel that killed a process."""

from __future__ import annotations

import re

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import first_amount, sized

_CPU_REQUEST = sized(r"allocate\s{1,4}AMOUNT")
_NUMPY_REQUEST = sized(r"Unable to allocate\s{1,4}AMOUNT")
_PINNED = sized(r"(?:allocate|allocating)\s{1,4}AMOUNT")
_SHAPE = re.compile(r"with shape (\([\d, ]{1,120}\)) and data type (\w{1,20})")
_OOM_KILL = re.compile(r"Killed process (\d{1,10}) \(([^)]{1,60})\)")
_RSS = re.compile(r"anon-rss:(\d{1,15})kB")
_SIGNAL = re.compile(r"DataLoader worker \(pid\(?s?\)?\s?([\d, ]{1,200})\) (?:is|was|exited)")
_FILE = re.compile(r"(?:file|object)\s{0,2}<?(/[^\s>]{1,120})>?")
_BYTES = re.compile(r"unable to mmap (\d{1,18}) bytes")
_PATH = re.compile(r"No space left on device:?\s{0,2}[:']{0,3}\s{0,2}'?(/[^'\s]{1,200})?")
_KILLED_LINE = re.compile(
    r"(?:^|\s)Killed(?:\s{2,}\S.{0,200}|\s{0,4}\(core dumped\))?$"
    r"|:\s{0,4}\d{1,6}\s{1,4}Killed\s{1,40}\S|^zsh: killed\b"
)
_EXIT = re.compile(
    r"exit(?:ed|s)?[ _]?(?:code|status|with(?: return)? code|with status)?\s{0,12}[:=]?\s{0,2}(?:-9|137)\b"
    r"|exitcode\s{0,12}[:=]?\s{0,2}(?:-9|137)\b|return code\s{0,2}[:=]\s{0,2}-9\b"
    r"|Signal 9 \(SIGKILL\)|<Signals\.SIGKILL|interrupted by signal 9|terminated by signal SIGKILL",
    re.IGNORECASE,
)


def _cpu_allocator(passage: Passage) -> Message:
    requested = first_amount(_CPU_REQUEST, passage.joined(2))
    return Message(
        kind="cpu-allocator",
        framework="pytorch",
        form="DefaultCPUAllocator",
        sizes={} if requested is None else {"requested": requested},
    )


def _numpy(passage: Passage) -> Message:
    text = passage.joined(2)
    requested = first_amount(_NUMPY_REQUEST, text)
    shape = _SHAPE.search(text)
    return Message(
        kind="host-memory-error",
        framework="numpy",
        sizes={} if requested is None else {"requested": requested},
        words={} if shape is None else {"shape": shape[1], "dtype": shape[2]},
    )


def _memory_error(passage: Passage) -> Message | None:
    text = passage.line.text
    if (
        "cuda" in text.lower()
        or "Unable to allocate" in passage.joined(2)
        or not re.search(r"(?:^|\s)MemoryError\b", text)
    ):
        return None
    return Message(kind="host-memory-error", framework="python")


def _bad_alloc(passage: Passage) -> Message | None:
    text = passage.joined(2).lower()
    if "cuda" in text or "rmm" in text:
        return None
    return Message(kind="host-memory-error", framework="c++")


def _errno_12(passage: Passage) -> Message | None:
    text = passage.joined(1)
    if "CPUAllocator" in text or "torch_" in text or "unable to" in text.lower():
        return None
    return Message(kind="host-memory-error", framework="system", words={"errno": "12"})


def _oom_killer(passage: Passage) -> Message:
    text = passage.joined(2)
    killed, rss = _OOM_KILL.search(text), _RSS.search(text)
    words = {} if killed is None else {"pid": killed[1], "name": killed[2]}
    lowered = text.lower()
    cgroup = any(name in lowered for name in ("cgroup", "oomkilled", "slurm", "memory limit"))
    return Message(
        kind="oom-killer",
        framework="linux",
        form="cgroup" if cgroup else "kernel",
        sizes={} if rss is None else {"resident": int(rss[1]) << 10},
        words=words,
    )


def _killed(passage: Passage) -> Message | None:
    if _KILLED_LINE.search(passage.line.text) is None or "worker" in passage.line.text.lower():
        return None
    return Message(kind="killed", framework="linux", form="Killed")


def _exit_code(passage: Passage) -> Message | None:
    if _EXIT.search(passage.line.text) is None:
        return None
    return Message(kind="killed", framework="linux", form="exit code 137 or -9 (SIGKILL)")


def _worker(passage: Passage) -> Message | None:
    text = passage.joined(2)
    lowered = text.lower()
    if "dataloader worker" not in lowered:
        return None
    found = _SIGNAL.search(text)
    words = {} if found is None else {"pids": found[1].strip()}
    if "bus error" in lowered:
        kind = "shm-bus"
    elif "segmentation" in lowered or "aborted" in lowered:
        kind = "worker-crash"
    elif "killed" in lowered and "exited" not in lowered:
        kind = "worker-killed"
    elif "exited unexpectedly" in lowered:
        kind = "worker-exit"
    else:
        return None
    return Message(kind=kind, framework="pytorch", form="DataLoader", words=words)


def _bus_error(passage: Passage) -> Message | None:
    text = passage.line.text.lower()
    if "dataloader worker" in text:
        return None
    return Message(kind="shm-bus", framework="pytorch" if "worker" in text else "system")


def _shared_file(passage: Passage) -> Message | None:
    """``unable to … shared memory …``: full, or something else, as the errno says."""
    text = passage.joined(2)
    lowered = text.lower()
    found, amount = _FILE.search(text), _BYTES.search(text)
    words = {} if found is None else {"file": re.sub(r"\d{2,}", "N", found[1])}
    sizes = {} if amount is None else {"requested": int(amount[1])}
    if "too many open files" in lowered or "(24)" in lowered:
        kind = "too-many-files"
    elif "no space left" in lowered or "(28)" in lowered or "unable to write" in lowered:
        kind = "shm-full"
    elif "cannot allocate memory" in lowered or "(12)" in lowered:
        kind = "host-mmap"
    elif "no such file" in lowered or "(2)" in lowered:
        kind = "shm-gone"
    elif "permission denied" in lowered or "(13)" in lowered:
        kind = "shm-permission"
    else:
        kind = "shm-full"
    return Message(kind=kind, framework="pytorch", form="shared memory", words=words, sizes=sizes)


def _no_space(passage: Passage) -> Message | None:
    text = passage.joined(2)
    lowered = text.lower()
    if "unable to" in lowered and "torch_" in lowered:
        return None
    path = _PATH.search(text)
    name = "" if path is None or path[1] is None else path[1]
    shared = "/dev/shm" in text or "nccl-" in lowered or "shared memory" in lowered
    kind = "shm-full" if shared else "disk-full"
    return Message(kind=kind, framework="nccl" if "nccl" in lowered else "system", words={"file": name})


def _too_many_files(passage: Passage) -> Message | None:
    if "shared memory object" in passage.line.text.lower():
        return None
    return Message(kind="too-many-files", framework="system")


def _pinned(passage: Passage) -> Message:
    amount = first_amount(_PINNED, passage.joined(1))
    return Message(
        kind="pinned-memory",
        framework="llama.cpp" if "ggml" in passage.line.text else "cuda",
        sizes={} if amount is None else {"requested": amount},
    )


SIGNATURES = (
    Signature(trigger="defaultcpuallocator", read=_cpu_allocator),
    Signature(trigger="posix_memalign", read=_cpu_allocator),
    Signature(trigger="$ torch: not enough memory", read=_cpu_allocator),
    Signature(trigger="unable to allocate", read=lambda p: _numpy(p) if "array" in p.joined(2) else None),
    Signature(trigger="memoryerror", read=_memory_error),
    Signature(trigger="bad_alloc", read=_bad_alloc),
    Signature(trigger="[errno 12]", read=_errno_12),
    Signature(trigger="cannot allocate memory", read=_errno_12),
    Signature(trigger="out of memory: kill", read=_oom_killer),
    Signature(trigger="oom-kill", read=_oom_killer),
    Signature(trigger="oom_kill", read=_oom_killer),
    Signature(trigger="oomkilled", read=_oom_killer),
    Signature(trigger="invoked oom-killer", read=_oom_killer),
    Signature(trigger="exceeded memory limit", read=_oom_killer),
    Signature(trigger="killed", read=_killed),
    Signature(trigger="exitcode", read=_exit_code),
    Signature(trigger="exit code", read=_exit_code),
    Signature(trigger="return code", read=_exit_code),
    Signature(trigger="sigkill", read=_exit_code),
    Signature(trigger="signal 9", read=_exit_code),
    Signature(trigger="dataloader worker", read=_worker),
    Signature(trigger="bus error", read=_bus_error),
    Signature(trigger="unable to allocate shared memory", read=_shared_file),
    Signature(trigger="unable to open shared memory object", read=_shared_file),
    Signature(trigger="unable to write to file </torch_", read=_shared_file),
    Signature(trigger="unable to resize file </torch_", read=_shared_file),
    Signature(trigger="unable to mmap", read=_shared_file),
    Signature(trigger="couldn't allocate shared memory", read=_shared_file),
    Signature(trigger="creating shared memory segment", read=_no_space),
    Signature(trigger="no space left on device", read=_no_space),
    Signature(trigger="too many open files", read=_too_many_files),
    Signature(trigger="items of ancdata", read=_too_many_files),
    Signature(trigger="mib of pinned memory", read=_pinned),
    Signature(
        trigger="cudahostalloc", read=lambda p: _pinned(p) if "memory" in p.line.text.lower() else None
    ),
)
