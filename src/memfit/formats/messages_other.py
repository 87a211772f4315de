"""Errors that look like memory and are not, and hints that a log gives beside its errors."""

from __future__ import annotations

import re
from collections.abc import Callable

from memfit.formats.messages import Message, Passage, Role, Signature
from memfit.formats.messages_amounts import first_amount, sized

_OPTION = re.compile(r"Unrecognized (?:CachingAllocator|key)\w{0,20}(?: option)?:?\s{0,4}'?([^\s']{1,80})")
_CONFIG = re.compile(
    r"\b(PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF)\s{0,2}[=:]\s{0,2}[\"']?([A-Za-z_]\w{2,40}:[\w:.,\[\]>-]{1,200})"
)
_TORCH = re.compile(
    r"\btorch(?:\s{0,12}[=:]{1,2}\s{0,12}|\s{1,20}(?=\d\.)|-)(\d{1,2}\.\d{1,2}(?:\.\d{1,2})?)"
    r"|pytorch(?: version)?\s{0,12}[:=-]{0,2}\s{0,12}v?(\d{1,2}\.\d{1,2}(?:\.\d{1,2})?)",
    re.IGNORECASE,
)
_SHAPES = re.compile(r"'shape': torch\.Size\(\[([\d, ]{0,80})\]\)")
_DTYPES = re.compile(r"'dtype': torch\.(\w{1,20})")
_AMD_VRAM = re.compile(r"(?:VRAM:|VRAM RAM=|amdgpu:)\s{0,2}(\d{2,9})M\b(?:.{0,40}?(?:used|of VRAM|, BAR))?")
_AMD_GTT = re.compile(r"(\d{2,9})M of GTT memory")
_SYSFS = re.compile(r"mem_info_(vram|gtt)_total\D{0,6}(\d{6,16})")
_ARCHITECTURE = re.compile(
    r"\b(gfx(?:90c|1103|115[0-3]|1035|1036|1150|1151)|Strix|Ryzen AI|GB10|Jetson|Orin|Tegra)\b", re.IGNORECASE
)
_SHM_SIZE = sized(
    r"(?:shm|tmpfs)\s{1,30}AMOUNT\s{1,20}(?:AMOUNT|0)\s{1,20}(?:AMOUNT|0)\s{1,20}\d{1,3}%\s{1,8}/dev/shm"
)


def _plain(kind: str, framework: str = "pytorch", role: Role = "failure") -> Callable[[Passage], Message]:
    """A message that its words alone tell."""

    def read(passage: Passage) -> Message:
        return Message(kind=kind, framework=framework, role=role)

    return read


def _checkpoint(passage: Passage) -> Message:
    text = passage.joined(14)
    shapes = _SHAPES.findall(text)
    dtypes = set(_DTYPES.findall(text))
    count = "number of tensors" in text or "A different number" in text
    if any(shape.strip() == "0" for shape in shapes):
        what = "sharded"
    elif count:
        what = "count"
    elif len(dtypes) > 1 and len({shape.strip() for shape in shapes}) <= max(len(shapes) // 2, 1):
        what = "dtype"
    else:
        what = "shape"
    return Message(kind="checkpoint-mismatch", framework="pytorch", words={"difference": what})


def _option(passage: Passage) -> Message:
    found = _OPTION.search(passage.joined(1))
    return Message(
        kind="allocator-setting", framework="pytorch", words={} if found is None else {"option": found[1]}
    )


def _configuration(passage: Passage) -> Message | None:
    found = _CONFIG.search(passage.line.text)
    if found is None or "try setting" in passage.line.text[max(found.start() - 20, 0) : found.start()]:
        return None
    return Message(
        kind="allocator-configuration",
        role="fact",
        framework="pytorch",
        words={"variable": found[1], "value": found[2].rstrip(".,")},
    )


def _version(passage: Passage) -> Message | None:
    found = _TORCH.search(passage.line.text)
    if found is None:
        return None
    return Message(
        kind="torch-version", role="fact", framework="pytorch", words={"version": found[1] or found[2]}
    )


def _amd_memory(passage: Passage) -> Message | None:
    text = passage.line.text
    sizes: dict[str, int] = {}
    vram, gtt = _AMD_VRAM.search(text), _AMD_GTT.search(text)
    if gtt is not None:
        sizes["gtt"] = int(gtt[1]) << 20
    elif vram is not None:
        sizes["vram"] = int(vram[1]) << 20
    for name, value in _SYSFS.findall(text):
        sizes[name] = int(value)
    return Message(kind="amd-memory", role="fact", framework="linux", sizes=sizes) if sizes else None


def _shared_with_host(passage: Passage) -> Message | None:
    found = _ARCHITECTURE.search(passage.line.text)
    if found is None:
        return None
    return Message(kind="unified-memory", role="fact", framework="system", words={"device": found[1]})


def _shm_size(passage: Passage) -> Message | None:
    size = first_amount(_SHM_SIZE, passage.line.text)
    if size is None:
        return None
    return Message(kind="shm-size", role="fact", framework="linux", sizes={"total": size})


_NAN_TRIGGERS = ("loss is nan", "loss: nan", "loss=nan", "nan loss", "returned nan values", "nan detected")
_TORCH_TRIGGERS = (
    "torch=",
    "torch version",
    "torch 1.",
    "torch 2.",
    "torch-0.",
    "torch-1.",
    "torch-2.",
    "torch  ",
)


_PLAIN: tuple[tuple[str, str], ...] = (
    ("an illegal memory access was encountered", "illegal-access"),
    ("cuda_error_illegal_address", "illegal-access"),
    ("memory access fault by gpu", "illegal-access"),
    ("misaligned address", "illegal-access"),
    ("device-side assert triggered", "device-assert"),
    ("index out of bounds", "device-assert"),
    ("assertion `srcindex < srcselectdimsize` failed", "device-assert"),
    ("no kernel image is available", "no-kernel-image"),
    ("is not compatible with the current pytorch installation", "no-kernel-image"),
    ("driver version is insufficient", "driver-old"),
    ("nvidia driver on your system is too old", "driver-old"),
    ("cuda-capable device(s) is/are busy", "device-busy"),
    ("all cuda-capable devices are busy", "device-busy"),
    ("invalid device ordinal", "device-ordinal"),
    ("no cuda gpus are available", "no-device"),
    ("no devices were found", "no-device"),
    ("torch not compiled with cuda enabled", "no-device"),
    ("unspecified launch failure", "launch-failure"),
    ("uncorrectable ecc error", "hardware"),
    ("has fallen off the bus", "hardware"),
    ("gpu is lost", "hardware"),
    ("too many resources requested for launch", "launch-resources"),
    ("expected all tensors to be on the same device", "other-device"),
    ("none of the inputs have requires_grad=true", "checkpoint-no-grad"),
    ("marked as ready twice", "ready-twice"),
    ("mark a variable ready only once", "ready-twice"),
    ("unscale_() has already been called", "unscale-twice"),
    ("attempting to unscale fp16 gradients", "unscale-fp16"),
    ("trying to backward through the graph a second time", "backward-twice"),
    ("expandable_segments not supported on this platform", "expandable-unsupported"),
    ("communicate with the nvidia driver", "driver-unreachable"),
    ("failed to initialize nvml", "driver-unreachable"),
    ("driver/library version mismatch", "driver-unreachable"),
    ("recursionerror", "recursion"),
    ("stack overflow", "recursion"),
)  # fmt: skip

SIGNATURES = (
    *(Signature(trigger=trigger, read=_plain(kind)) for trigger, kind in _PLAIN),
    Signature(trigger="nvml_success == r", read=_plain("nvml-assert")),
    Signature(
        trigger="some modules are dispatched on the cpu or the disk",
        read=_plain("offload-refused", "bitsandbytes"),
    ),
    Signature(trigger="no executable batch size found", read=_plain("no-batch-size", "accelerate")),
    Signature(trigger="offloaded to the cpu", read=_plain("offloaded", "accelerate", "warning")),
    Signature(trigger="offloaded to the disk", read=_plain("offloaded", "accelerate", "warning")),
    Signature(trigger="ran out of memory outside pytorch's allocator", read=_plain("outside-oom")),
    Signature(
        trigger="recomputed values for the following tensors have different metadata", read=_checkpoint
    ),
    Signature(trigger="different number of tensors was saved", read=_checkpoint),
    Signature(trigger="unrecognized cachingallocator option", read=_option),
    Signature(
        trigger="unrecognized key", read=lambda p: _option(p) if "alloc" in p.joined(1).lower() else None
    ),
    Signature(trigger="alloc_conf", read=_configuration),
    *(Signature(trigger=trigger, read=_version) for trigger in _TORCH_TRIGGERS),
    Signature(trigger="vram", read=_amd_memory),
    Signature(trigger="of gtt memory", read=_amd_memory),
    Signature(trigger="mem_info_", read=_amd_memory),
    Signature(trigger="gfx", read=_shared_with_host),
    Signature(trigger="strix", read=_shared_with_host),
    Signature(trigger="ryzen ai", read=_shared_with_host),
    Signature(trigger="gb10", read=_shared_with_host),
    Signature(trigger="jetson", read=_shared_with_host),
    Signature(trigger="/dev/shm", read=_shm_size),
    *(Signature(trigger=trigger, read=_plain("nan")) for trigger in _NAN_TRIGGERS),
)
