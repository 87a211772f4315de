"""How long an operator takes on a GPU: a roofline with an efficiency for each class of operators. No torch
here.

    seconds = max(flops / (peak x share), bytes / (bandwidth x share), launch)

Where the shares come from:

* matrix products 0.7, convolutions 0.6, attention 0.5 of the dense peak: large cuBLAS products reach 70-80 %
of an A100's or
  H100's peak; FlashAttention-2 reports 50-73 % forward and about 50 % backward on an A100 (Dao 2023, table
  1).
* memory-bound operators 0.8 of the bandwidth for element-wise, optimizer and copies (STREAM-like kernels
reach 80-90 %),
  less for reductions and normalizations (two passes), and for gathers (scattered rows).
* 4 microseconds is what a kernel's launch takes at least in eager mode.

Good enough to rank plans and to weigh recomputation, not to promise times: shares of a given GPU differ by
tens of per cent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from memfit.capture.graph import Op
from memfit.core.devices import GPU

LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True, kw_only=True)
class OpClass:
    """A class of operators: which names belong to it, and what share of the device's peaks it reaches."""

    name: str
    words: tuple[str, ...]
    compute_share: float = 0.7
    bandwidth_share: float = 0.8


# The first class with a word in the operator's name has it, so the special ones come before the general ones.
OP_CLASSES: tuple[OpClass, ...] = (
    OpClass(name="optimizer", words=("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")),
    OpClass(
        name="attention",
        words=("scaled_dot_product", "flash_attention", "efficient_attention"),
        compute_share=0.5,
    ),
    OpClass(name="convolution", words=("convolution", "conv1d", "conv2d", "conv3d"), compute_share=0.6),
    OpClass(
        name="gemm",
        words=("mm.", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "linear", "matmul", ".dot.", ".mv."),
    ),
    OpClass(name="normalization", words=("norm",), bandwidth_share=0.65),
    OpClass(
        name="gather",
        words=("embedding", "index", "gather", "scatter", "nll_loss", "take", "topk", "sort"),
        bandwidth_share=0.5,
    ),
    OpClass(
        name="reduction",
        words=(
            "softmax",
            "sum",
            "mean",
            "amax",
            "amin",
            "argmax",
            "pool",
            "var.",
            "var_mean",
            "cross_entropy",
        ),
        bandwidth_share=0.7,
    ),
    OpClass(
        name="copy", words=("copy", "clone", "cat.", "stack", "zero", "fill", "_backward_select", "slice")
    ),
    OpClass(name="elementwise", words=("",)),
)

_PEAK_KEYS: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "float16": ("fp16", "fp32"),
    "bfloat16": ("bf16", "fp16", "fp32"),
    "float8_e4m3fn": ("fp8", "fp16", "fp32"),
    "float8_e5m2": ("fp8", "fp16", "fp32"),
}


@lru_cache(maxsize=4096)
def op_class(name: str) -> OpClass:
    """The class of an operator, by its name ``"aten.mm.default"``."""
    plain = name.partition(".")[2] or name
    return next(cls for cls in OP_CLASSES if any(word in f".{plain}" for word in cls.words))


def op_seconds(op: Op, gpu: GPU) -> float:
    """Predicted seconds of one operator on ``gpu``; views take none."""
    return roofline_seconds(op.name, round(op.flops * op.work), op.bytes_moved, op.dtype, gpu)


def step_seconds(ops: Iterable[Op], gpu: GPU) -> float:
    """Predicted seconds of operators run one after another."""
    return sum(op_seconds(op, gpu) for op in ops)


def roofline_seconds(name: str, flops: int, bytes_moved: int, dtype: str, gpu: GPU) -> float:
    """Predicted seconds of an operator that does ``flops`` in ``dtype`` and moves ``bytes_moved``."""
    if not flops and not bytes_moved:
        return 0.0
    cls = op_class(name)
    compute = flops / (peak_flops(dtype, gpu) * cls.compute_share)
    memory = bytes_moved / (gpu.bandwidth_bytes_per_second * cls.bandwidth_share)
    return max(compute, memory, LAUNCH_SECONDS)


def peak_flops(dtype: str, gpu: GPU) -> float:
    """The GPU's dense peak in ``dtype`` (torch's name, or ``"tf32"``), or in the next wider type."""
    keys = _PEAK_KEYS.get(dtype, ("fp32",))
    return next(gpu.peak_flops[key] for key in (*keys, "fp32") if key in gpu.peak_flops)
