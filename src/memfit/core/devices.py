"""GPUs as values: how much memory, how fast, which architecture; found by name, or described by size."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, parse_bytes

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Keys that `GPU.peak_flops` may have; ``fp16`` and ``bf16`` accumulate in fp32, as PyTorch multiplies."""

SHARED_MEMORY_PER_BLOCK_BYTES: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (7, 5): 64 << 10,
        (8, 0): 163 << 10,
        (8, 6): 99 << 10,
        (8, 9): 99 << 10,
        (9, 0): 227 << 10,
        (10, 0): 227 << 10,
        (10, 3): 227 << 10,
        (12, 0): 99 << 10,
    }
)
"""Most shared memory that one block may opt in to, by compute capability (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"). Its keys are the architectures that memfit knows."""

_SPARE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One model of NVIDIA GPU.

    Args:
        key: what it is asked for by (``"rtx3060-12gb"``).
        name: what the driver calls it.
        compute_capability: ``(8, 6)`` for sm_86.
        sm_count: streaming multiprocessors.
        nvml_total_bytes: the total that nvidia-smi shows.
        runtime_total_bytes: the total that ``torch.cuda.mem_get_info()`` and out-of-memory messages show;
            smaller.
        context_bytes: what a process holds before its first tensor (CUDA context, torch's kernels, library
            handles).
        l2_bytes: second-level cache.
        bandwidth_bytes_per_second: device memory, nominal.
        peak_flops: dense FLOP/s by dtype (see `DTYPES`), without sparsity, at boost clock; a dtype that the
            chip has no units for is absent.
        host_link_bytes_per_second: one direction of the link to the host, nominal.
        sources: where each figure is from; ``"estimated: …"`` names the rule that was used instead.
    """

    key: str
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    nvml_total_bytes: int
    runtime_total_bytes: int
    context_bytes: int
    l2_bytes: int
    bandwidth_bytes_per_second: float
    peak_flops: Mapping[str, float]
    host_link_bytes_per_second: float
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_budget_bytes(self) -> int:
        """What the allocator may reserve if nothing else is said: the runtime total less context and 2 %."""
        return int(self.runtime_total_bytes - self.context_bytes - _SPARE_SHARE * self.runtime_total_bytes)

    @property
    def architecture(self) -> str:
        """The architecture as compilers spell it: ``"sm_86"``."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def shared_memory_per_block_bytes(self) -> int:
        """Most shared memory that one block may opt in to."""
        return SHARED_MEMORY_PER_BLOCK_BYTES[self.compute_capability]


def find_gpu(text: str) -> GPU:
    """The GPU that ``text`` names.

    Args:
        text: a key of the catalogue (``"rtx3060-12gb"``), another usual name (``"3060"``, ``"A100"``,
            ``"NVIDIA H100 80GB HBM3"``), or a size and an architecture (``"24GiB,sm89"``), with any of
            ``bandwidth=900GB/s``, ``sms=60``, ``l2=48MiB``, ``bf16=120TFLOPS`` … after them. A custom GPU
            takes what is not said from the catalogue's nearest one of its architecture.

    Raises:
        UsageError: unknown; the message has the closest names.

    Examples:
        >>> find_gpu("a100").key
        'a100-80gb'
    """
    from memfit.core.catalogue import CATALOGUE, NOT_SUPPORTED

    names = _names()
    wanted = _plain(text)
    if wanted in names:
        return CATALOGUE[names[wanted]]
    if "," in text:
        return _custom_gpu(text)
    if wanted in NOT_SUPPORTED:
        raise UsageError(f"GPU {text!r} cannot be used: {NOT_SUPPORTED[wanted]}")
    close = difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)
    keys = list(dict.fromkeys(names[name] for name in close)) or ["rtx3060-12gb", "a100-80gb", "h100-80gb"]
    raise UsageError(
        f"unknown GPU {text!r}; did you mean {', '.join(keys)}? `memfit gpus` lists all, and a size with an "
        "architecture, like 24GiB,sm89, describes any other"
    )


@cache
def _names() -> dict[str, str]:
    """Every accepted spelling, plain, with the key that it means."""
    from memfit.core.catalogue import ALIASES, CATALOGUE

    names = {_plain(alias): key for alias, key in ALIASES.items()}
    for key, gpu in CATALOGUE.items():
        names[_plain(key)] = names[_plain(gpu.name)] = key
    return names


def _plain(name: str) -> str:
    """Lower case, without maker, series and separators: "NVIDIA GeForce RTX 4090", "rtx-4090": "4090"."""
    plain = re.sub(r"[^a-z0-9,]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?(rtx(?=[0-9]))?", "", plain)


def _custom_gpu(text: str) -> GPU:
    size, architecture, *settings = (part.strip() for part in text.split(","))
    match = re.fullmatch(r"(?:sm_?|cc)?([0-9]{1,2})\.?([0-9])", architecture.lower())
    total_bytes = parse_bytes(size, what=f"memory of the GPU {text!r}")
    if match is None:
        raise UsageError(f"GPU {text!r}: {architecture!r} is not an architecture; write it like 24GiB,sm89")
    capability = (int(match[1]), int(match[2]))
    model = _nearest(capability, total_bytes, text)
    context_bytes = model.context_bytes
    # The share that the driver keeps for itself is taken to be the nearest GPU's.
    runtime_bytes = int(total_bytes * model.runtime_total_bytes / model.nvml_total_bytes)
    if runtime_bytes <= context_bytes:
        raise UsageError(
            f"GPU {text!r}: {size} is less than a CUDA context takes ({format_bytes(context_bytes)})"
        )
    gpu = replace(
        model,
        key=text,
        name=f"custom GPU {size} {architecture}",
        compute_capability=capability,
        nvml_total_bytes=total_bytes,
        runtime_total_bytes=runtime_bytes,
        sources={"all": f"as asked for; the rest estimated: as {model.name}"},
    )
    for setting in settings:
        gpu = _with_setting(gpu, setting, text)
    return gpu


def _nearest(capability: tuple[int, int], total_bytes: int, text: str) -> GPU:
    """The catalogue's GPU of that architecture (or of its generation) whose memory is nearest in size."""
    from memfit.core.catalogue import CATALOGUE

    same = [gpu for gpu in CATALOGUE.values() if gpu.compute_capability == capability]
    if not same and capability in SHARED_MEMORY_PER_BLOCK_BYTES:  # a sibling of the same generation
        same = [gpu for gpu in CATALOGUE.values() if gpu.compute_capability[0] == capability[0]]
    if not same:
        known = ", ".join(f"sm{major}{minor}" for major, minor in sorted(SHARED_MEMORY_PER_BLOCK_BYTES))
        raise UsageError(f"GPU {text!r}: memfit knows no GPU of that architecture; it knows {known}")
    return min(same, key=lambda gpu: abs(gpu.nvml_total_bytes - total_bytes))


def _with_setting(gpu: GPU, setting: str, text: str) -> GPU:
    name, _, value = (part.strip() for part in setting.partition("="))
    what = f"{name} of the GPU {text!r}"
    if name == "bandwidth":
        return replace(
            gpu, bandwidth_bytes_per_second=float(parse_bytes(re.sub(r"/s$", "", value), what=what))
        )
    if name == "l2":
        return replace(gpu, l2_bytes=parse_bytes(value, what=what))
    if name == "sms" and re.fullmatch(r"[1-9][0-9]{0,3}", value):
        return replace(gpu, sm_count=int(value))
    if name in DTYPES:
        return replace(gpu, peak_flops={**gpu.peak_flops, name: _flops(value, what)})
    accepted = ", ".join(
        ["bandwidth=900GB/s", "l2=48MiB", "sms=60", *(f"{dtype}=…TFLOPS" for dtype in DTYPES)]
    )
    raise UsageError(f"GPU {text!r}: {setting!r} is not a setting; use any of {accepted}")


def _flops(value: str, what: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?T(?:FLOP/?s|FLOPS)?", value, flags=re.IGNORECASE)
    if match is None:
        raise UsageError(f"{what}: {value!r} is not a rate; write it like 120TFLOPS")
    return float(match[1]) * 1e12
