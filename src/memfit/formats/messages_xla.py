"""JAX's and TensorFlow's messages: XLA's buffers, the BFC allocator, start-up failures beside a full GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import first_amount, read_amount, sized

_DTYPE_BYTES: Mapping[str, int] = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "int16": 2, "int32": 4, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_XLA: Mapping[str, re.Pattern[str]] = {
    "requested": sized(r"(?:while trying to allocate|Failed to allocate request for)\s{1,4}AMOUNT"),
    "parameters": sized(r"parameter allocation:\s{1,20}AMOUNT"),
    "constants": sized(r"constant allocation:\s{1,20}AMOUNT"),
    "outputs": sized(r"maybe_live_out allocation:\s{1,20}AMOUNT"),
    "temporaries": sized(r"preallocated temp allocation:\s{1,20}AMOUNT"),
    "program": sized(r"total allocation:\s{1,20}AMOUNT"),
}
_GAPS = re.compile(r"total fragmentation:\s{1,20}\S{1,20}\s{0,2}\((\d{1,3}(?:\.\d{1,4})?)%\)")
_USED_OF = re.compile(r"Used ([\d.]{1,12}[KMGT]) of ([\d.]{1,12}[KMGT]) hbm", re.IGNORECASE)
_SHAPE = re.compile(r"shape\s{0,2}\[([\d,\s]{1,120})\](?: and type (\w{1,12}))?")
_ALLOCATOR = re.compile(r"by allocator (\w{1,40})", re.IGNORECASE)
_BFC = sized(r"ran out of memory trying to allocate\s{1,4}AMOUNT")
_STATS: Mapping[str, re.Pattern[str]] = {
    "limit": re.compile(r"\bLimit:\s{1,30}(\d{1,18})"),
    "in_use": re.compile(r"\bInUse:\s{1,30}(\d{1,18})"),
    "peak": re.compile(r"\bMaxInUse:\s{1,30}(\d{1,18})"),
}
_CREATED = re.compile(
    r"Created (?:TensorFlow )?device .{0,160}?(?:with|->) ?\(?(\d{2,7}) MB memory", re.IGNORECASE
)
_FROM_DEVICE = re.compile(
    r"failed to alloc\w{0,4}\s{1,4}(?:\S{1,12}\s{1,2}\()?(\d{1,18}) bytes", re.IGNORECASE
)


def _jax(passage: Passage) -> Message | None:
    text = passage.joined(14)
    again = text.find("RESOURCE_EXHAUSTED", 40)
    text = text if again < 0 else text[:again]
    sizes = {
        name: value for name, pattern in _XLA.items() if (value := first_amount(pattern, text)) is not None
    }
    gaps = _GAPS.search(text)
    figures = {} if gaps is None else {"gaps_percent": float(gaps[1])}
    hbm = _USED_OF.search(text)
    if hbm is not None:
        for name, text_of_size in (("program", hbm[1]), ("total", hbm[2])):
            size = read_amount(text_of_size)
            if size is not None:
                sizes[name] = size
    if not sizes:
        return None
    return Message(
        kind="jax-oom", framework="jax/xla", form="RESOURCE_EXHAUSTED", sizes=sizes, figures=figures
    )


def _tensorflow(passage: Passage) -> Message | None:
    text = passage.joined(3)
    shape = _SHAPE.search(text)
    allocator = _ALLOCATOR.search(text)
    sizes: dict[str, int] = {}
    words = {"allocator": allocator[1]} if allocator else {}
    if shape is not None:
        numbers = [int(number) for number in re.findall(r"\d{1,12}", shape[1])][:12]
        words["shape"] = "[" + ",".join(map(str, numbers)) + "]"
        if shape[2]:
            words["dtype"] = shape[2]
        size = math.prod(numbers) * _DTYPE_BYTES.get(shape[2] or "float", 4)
        if numbers and size < 1 << 62:
            sizes["requested"] = size
    on_host = "cpu" in words.get("allocator", "").lower() or "/device:cpu" in text.lower()
    kind = "tf-host-oom" if on_host else "tf-oom"
    return Message(kind=kind, framework="tensorflow", form="ResourceExhaustedError", sizes=sizes, words=words)


def _bfc(passage: Passage) -> Message | None:
    text = passage.joined(1)
    size = first_amount(_BFC, text)
    near = " ".join(passage.before[-20:]).lower() + text.lower()
    framework = "jax/xla" if "xla" in near or "jax" in near else "tensorflow"
    harmless = "not a failure" in text
    return Message(
        kind="bfc-oom",
        role="warning" if harmless else "failure",
        framework=framework,
        form="BFC allocator",
        sizes={} if size is None else {"requested": size},
    )


def _stats(passage: Passage) -> Message | None:
    text = passage.joined(6)
    sizes = {
        name: int(match[1]) for name, pattern in _STATS.items() if (match := pattern.search(text)) is not None
    }
    if len(sizes) < 2:
        return None
    return Message(kind="bfc-statistics", role="fact", framework="tensorflow", sizes=sizes)


def _created(passage: Passage) -> Message | None:
    found = _CREATED.search(passage.line.text)
    if found is None:
        return None
    return Message(
        kind="tf-device", role="fact", framework="tensorflow", sizes={"limit": int(found[1]) << 20}
    )


def _from_device(passage: Passage) -> Message | None:
    text = passage.joined(1)
    found = _FROM_DEVICE.search(text)
    if "device" not in text:
        return None
    near = " ".join(passage.before[-20:]).lower() + text.lower()
    framework = "tensorflow" if "tensorflow" in near else "jax/xla"
    return Message(
        kind="from-device",
        framework=framework,
        form="failed to allocate from device",
        sizes={} if found is None else {"requested": int(found[1])},
    )


def _handles(passage: Passage) -> Message:
    near = " ".join(passage.before[-20:]).lower() + passage.joined(2).lower()
    framework = "jax/xla" if "jax" in near or "external/xla" in near else "tensorflow"
    return Message(kind="handle-failed", framework=framework, form="DNN library initialization failed")


SIGNATURES = (
    Signature(trigger="resource_exhausted", read=_jax),
    Signature(trigger="resource exhausted: out of memory", read=_jax),
    Signature(trigger="resource exhausted: failed to allocate", read=_jax),
    Signature(trigger="oom when allocating tensor", read=_tensorflow),
    Signature(trigger="ran out of memory trying to allocate", read=_bfc),
    Signature(trigger="limit: ", read=_stats),
    Signature(trigger=" mb memory", read=_created),
    Signature(trigger="from device: ", read=_from_device),
    Signature(trigger="dnn library initialization failed", read=_handles),
    Signature(trigger="failed to get convolution algorithm", read=_handles),
    Signature(trigger="dnn library is not found", read=_handles),
    Signature(trigger="could not create cudnn handle", read=_handles),
    Signature(trigger="failed to create cublas handle", read=_handles),
)
