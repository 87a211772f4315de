"""PyTorch's own out-of-memory messages, 0.1 to 2.14: CUDA, ROCm, XPU, MPS, the cudaMallocAsync backend.

What each amount means is from c10/cuda/CUDACachingAllocator.cpp of the versions. "cached" (1.0 to 1.3) is
what is reserved and not allocated; "reserved in total" (1.4 to 2.0) is all of it; since 2.1 both parts are
named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import UNKNOWN_FROM_BYTES, first_amount, signed_bytes, sized
from memfit.formats.messages_devices import Process

_FIELDS: Mapping[str, re.Pattern[str]] = {
    "requested": sized(r"(?:Tried|Trying) to allocate\s{1,4}AMOUNT"),
    "total": sized(r"(?:total capac(?:i)?ty of\s{1,4}AMOUNT)"),
    "total_old": sized(r"AMOUNT\s{1,4}total capac"),
    "allocated": sized(r"AMOUNT\s{1,4}(?:already allocated|is allocated by PyTorch)"),
    "free": sized(r"(?:of which\s{1,4})?AMOUNT\s{1,4}(?:is )?free\b"),
    "reserved": sized(r"AMOUNT\s{1,4}reserved in total"),
    "cached": sized(r"AMOUNT\s{1,4}cached"),
    "unallocated": sized(r"AMOUNT\s{1,4}is reserved by PyTorch but unallocated"),
    "private_pools": sized(r"AMOUNT\s{1,4}allocated in private pools"),
    "allowed": sized(r"AMOUNT\s{1,4}allowed"),
    "this_process": sized(r"this process has\s{1,4}AMOUNT"),
}
_ASYNC: Mapping[str, re.Pattern[str]] = {
    "allocated": sized(r"Currently allocated\s{0,12}:\s{0,4}AMOUNT"),
    "requested": sized(r"Requested\s{0,20}:\s{0,4}AMOUNT"),
    "total": sized(r"Device limit\s{0,16}:\s{0,4}AMOUNT"),
    "free": sized(r"Free \(according to CUDA\)\s{0,4}:\s{0,4}AMOUNT"),
    "allowed": sized(r"memory fraction\)\s{0,40}:\s{0,4}AMOUNT"),
}
_MPS: Mapping[str, re.Pattern[str]] = {
    "allocated": sized(r"MPS allocated:\s{0,4}AMOUNT"),
    "other": sized(r"other allocations:\s{0,4}AMOUNT"),
    "allowed": sized(r"max allowed:\s{0,4}AMOUNT"),
    "requested": sized(r"Tried to allocate\s{1,4}AMOUNT"),
}
_PROCESS = sized(r"Process\s{1,4}(\d{1,10})\s{1,4}has\s{1,4}AMOUNT memory in use")
_GPU = re.compile(r"\bGPU\s{0,4}(\d{1,3})\b")
_VARIABLE = re.compile(r"try setting (PYTORCH_\w{0,10}ALLOC_CONF)")
_BACKEND = re.compile(r"\b(CUDA|HIP|XPU)\b out of memory", re.IGNORECASE)
_OTHERS = re.compile(
    r"you tried to allocate|CPUAllocator|while trying|memory trying|on private pool|MPS backend"
    r"|size larger than",
    re.IGNORECASE,
)
"""Others' messages with the same words."""
MOST_CHARACTERS = 3000
_LIMIT_REJECTED = sized(r"Requested size:\s{0,4}AMOUNT")
_LARGEST_BLOCK = sized(r"size larger than AMOUNT")


def _amounts(fields: Mapping[str, re.Pattern[str]], text: str) -> tuple[dict[str, int], dict[str, int]]:
    """The amounts that a text states, and those that are no amounts."""
    sizes: dict[str, int] = {}
    misread: dict[str, int] = {}
    for name, pattern in fields.items():
        value = first_amount(pattern, text)
        if value is None:
            continue
        name = name.removesuffix("_old")
        if value >= UNKNOWN_FROM_BYTES:
            misread.setdefault(name, signed_bytes(value))
        elif value >= 0:
            sizes.setdefault(name, value)
    return sizes, misread


def _own_text(text: str, start: str) -> str:
    """The text up to where the next message of the kind begins."""
    lowered = text.lower()
    begin = max(lowered.find(start), 0)
    again = lowered.find(start, begin + len(start))
    return (text[begin:] if again < 0 else text[begin:again])[:MOST_CHARACTERS]


def _out_of_memory(passage: Passage) -> Message | None:
    """The caching allocator's message with its numbers, in any of its formats."""
    if _OTHERS.search(passage.line.text):
        return None
    joined = passage.joined(8)
    text = _own_text(joined, "to allocate ")
    tight = _own_text(passage.joined_tightly(8), "to allocate ")
    head = joined[: max(joined.lower().find("to allocate "), 0) + 400]
    backend = _BACKEND.search(head[-700:]) or _BACKEND.search(" ".join(passage.before[-1:])[-700:])
    sizes, misread = _amounts(_FIELDS, "tried " + text)
    if not {"free", "allocated"} <= set(sizes):
        sizes = {**_amounts(_FIELDS, "tried " + tight)[0], **sizes}
    if "requested" not in sizes and "requested" not in misread:
        return None
    if backend is None and len(sizes) < 2 and "out of memory" not in head.lower():
        return None
    form = _form(sizes, text)
    if "cached" in sizes:
        sizes["unallocated"] = sizes.pop("cached")
    words = {"backend": backend[1].upper() if backend else "CUDA"}
    if (gpu := _GPU.search(text)) is not None:
        words["gpu"] = gpu[1]
    if (variable := _VARIABLE.search(text)) is not None:
        words["variable"] = variable[1]
    processes = dict.fromkeys(
        Process(int(match[1]), first_amount(_PROCESS_AMOUNT, match[0])) for match in _PROCESS.finditer(text)
    )
    known = {p for p in processes if p.used_bytes is not None and p.used_bytes < UNKNOWN_FROM_BYTES}
    return Message(
        kind="torch-oom",
        framework={"HIP": "pytorch (ROCm)", "XPU": "pytorch (XPU)"}.get(words["backend"], "pytorch"),
        form=form,
        sizes=sizes,
        misread=misread,
        words=words,
        processes=tuple(p if p in known else p._replace(used_bytes=None) for p in processes),
    )


_PROCESS_AMOUNT = sized(r"has\s{1,4}AMOUNT")


def _form(sizes: Mapping[str, int], text: str) -> str:
    """Which format it is, with the versions that print it."""
    if "cached" in sizes:
        return "1.0-1.3 (cached)"
    if "reserved" in sizes:
        return "1.10-2.0 (>> allocated memory)" if ">> allocated" in text else "1.4-2.0 (reserved in total)"
    if "unallocated" in sizes or "this_process" in sizes or "of which" in text:
        if "PYTORCH_ALLOC_CONF" in text:
            return "2.10+ (PYTORCH_ALLOC_CONF)"
        return "2.1 (max_split_size_mb)" if "max_split_size_mb" in text else "2.2+ (expandable_segments)"
    return "cut short"


def _too_large(passage: Passage) -> Message | None:
    return Message(kind="torch-size-overflow", framework="pytorch", form="more than 1EB")


def _rejected(passage: Passage) -> Message | None:
    text = passage.joined(4)
    sizes, misread = _amounts({"requested": _LIMIT_REJECTED, "total": _FIELDS["total"]}, text)
    return Message(
        kind="torch-limit", framework="pytorch", form="2.14 (rejected)", sizes=sizes, misread=misread
    )


def _async_backend(passage: Passage) -> Message | None:
    sizes, misread = _amounts(_ASYNC, passage.joined(8))
    unlimited = misread.pop("allowed", None) is not None
    return Message(
        kind="torch-oom-async",
        framework="pytorch",
        form="cudaMallocAsync",
        sizes=sizes,
        misread=misread,
        words={"limit": "none set"} if unlimited else {},
    )


def _bare(passage: Passage) -> Message | None:
    """The CUDA runtime's own words, without a number."""
    text = passage.line.text.lower()
    if "tried to allocate" in text or "nccl" in text or "failed to alloc" in text:
        return None
    if "tensorflow" in text or "xla" in text or "cuda_driver.cc" in text:
        return None
    if "driver error" in text:
        return None
    nearby = " ".join(passage.before[-40:]).lower() + text
    if "pin_memory" in nearby or "cudahostalloc" in nearby or "cachinghostallocator" in nearby:
        return Message(kind="pinned-memory", framework="pytorch")
    hip = "hip error" in text or "hiperror" in text
    old = "runtime error" in text or "thcudacheck" in text or "thcstorage" in text
    form = "0.1-0.4 (cuda runtime error (2))" if old else "bare 'HIP error'" if hip else "bare 'CUDA error'"
    return Message(kind="cuda-oom", framework="pytorch (ROCm)" if hip else "pytorch", form=form)


def _bare_allocation(passage: Passage) -> Message | None:
    """ "Allocation on device", which is all that cudaMallocAsync leaves in some front ends."""
    if "would exceed" in passage.joined(1).lower():
        return None
    return Message(kind="cuda-oom", framework="pytorch", form="bare 'Allocation on device'")


def _mps(passage: Passage) -> Message | None:
    sizes, misread = _amounts(_MPS, passage.joined(4))
    return Message(
        kind="mps-oom", framework="pytorch (MPS)", form="MPS backend", sizes=sizes, misread=misread
    )


def _xpu_block(passage: Passage) -> Message | None:
    text = passage.joined(4)
    sizes, misread = _amounts({**_FIELDS, "allowed": _LARGEST_BLOCK}, text)
    return Message(
        kind="xpu-block-limit", framework="pytorch (XPU)", form="IPEX", sizes=sizes, misread=misread
    )


def _cached_flushes(passage: Passage) -> Message | None:
    found = re.search(r"(\d{1,6}) pytorch allocator cache flushes", passage.line.text)
    return Message(
        kind="deepspeed-flushes",
        role="warning",
        framework="deepspeed",
        figures={"flushes": float(found[1])} if found else {},
    )


SIGNATURES = (
    Signature(trigger="to allocate more than 1eb", read=_too_large),
    Signature(trigger="can not allocate memory block with size larger", read=_xpu_block),
    Signature(trigger="preemptively rejected", read=_rejected),
    Signature(trigger="tried to allocate ", read=_out_of_memory),
    Signature(trigger="trying to allocate ", read=_out_of_memory),
    Signature(trigger="would exceed allowed memory", read=_async_backend),
    Signature(trigger="allocation on device", read=_bare_allocation),
    Signature(trigger="error: out of memory", read=_bare),
    Signature(trigger="runtime error (2)", read=_bare),
    Signature(trigger="runtime err(2)", read=_bare),
    Signature(trigger="error=2 : out of memory", read=_bare),
    Signature(trigger="cudaerrormemoryallocation", read=_bare),
    Signature(trigger="hiperroroutofmemory", read=_bare),
    Signature(trigger="mps backend out of memory", read=_mps),
    Signature(trigger="pytorch allocator cache flushes", read=_cached_flushes),
)
