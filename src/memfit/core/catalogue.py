"""The GPUs that memfit knows, each figure with its source.

What is said once per family: capability, the ratios of tensor-core rates to fp32, the link to the host, what
a process holds before its first tensor. What is said per GPU: size, totals, bandwidth, fp32 rate, SMs, L2.

`nvml_total_bytes` are MiB as nvidia-smi prints them. `runtime_total_bytes` are GiB as out-of-memory messages
print them, so they are known to 0.005 GiB; they differ a little between drivers, and the lowest one that was
found is kept. Where none was found, they follow `_RUNTIME_SHARE` of the nvidia-smi figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memfit.core.devices import GPU
from memfit.core.units import GIB, MIB

_RUNTIME_SHARE = 0.98
_ESTIMATED_RUNTIME = f"estimated: {_RUNTIME_SHARE:.0%} of the nvidia-smi total, the lower end of those found"


@dataclass(frozen=True, kw_only=True)
class _Family:
    compute_capability: tuple[int, int]
    rates: Mapping[str, float]
    """Dense tensor-core FLOP/s with fp32 accumulation, as multiples of the fp32 rate."""
    link_gb: float
    context_mib: int
    rate_source: str
    context_source: str


_TURING = _Family(
    compute_capability=(7, 5),
    rates={"fp16": 4},
    link_gb=15.75,
    context_mib=300,
    rate_source="NVIDIA Turing GPU Architecture whitepaper (WP-09183)",
    context_source="estimated",
)
_TESLA_T4 = _Family(**{**vars(_TURING), "rates": {"fp16": 8}, "rate_source": "NVIDIA T4 datasheet"})
_GA100 = _Family(
    compute_capability=(8, 0),
    rates={"tf32": 8, "fp16": 16, "bf16": 16},
    link_gb=31.5,
    context_mib=450,
    rate_source="NVIDIA A100 Tensor Core GPU Architecture whitepaper",
    context_source="estimated",
)
_AMPERE_GEFORCE = _Family(
    compute_capability=(8, 6),
    rates={"tf32": 1, "fp16": 2, "bf16": 2},
    link_gb=31.5,
    context_mib=300,
    rate_source="NVIDIA Ampere GA102 GPU Architecture whitepaper",
    context_source="estimated",
)
_AMPERE_PRO = _Family(**{**vars(_AMPERE_GEFORCE), "rates": {"tf32": 2, "fp16": 4, "bf16": 4}})
_ADA_GEFORCE = _Family(
    compute_capability=(8, 9),
    rates={"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4},
    link_gb=31.5,
    context_mib=400,
    rate_source="NVIDIA Ada GPU Architecture whitepaper",
    context_source="estimated",
)
_ADA_PRO = _Family(**{**vars(_ADA_GEFORCE), "rates": {"tf32": 2, "fp16": 4, "bf16": 4, "fp8": 8}})
_HOPPER = _Family(
    compute_capability=(9, 0),
    rates={"tf32": 7.394, "fp16": 14.79, "bf16": 14.79, "fp8": 29.58},
    link_gb=63.0,
    context_mib=520,
    rate_source="NVIDIA H100 Tensor Core GPU Architecture whitepaper",
    context_source="estimated",
)
_BLACKWELL_DATACENTER = _Family(
    compute_capability=(10, 0),
    rates={"tf32": 15, "fp16": 30, "bf16": 30, "fp8": 60},
    link_gb=63.0,
    context_mib=600,
    rate_source="NVIDIA Blackwell Architecture Technical Brief (HGX B200)",
    context_source="estimated",
)
_BLACKWELL_GEFORCE = _Family(
    compute_capability=(12, 0),
    rates={"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4},
    link_gb=63.0,
    context_mib=500,
    rate_source="NVIDIA RTX Blackwell GPU Architecture whitepaper",
    context_source="estimated",
)
_BLACKWELL_PRO = _Family(
    **{
        **vars(_BLACKWELL_GEFORCE),
        "rates": {"tf32": 2, "fp16": 4, "bf16": 4, "fp8": 8},
        "rate_source": "NVIDIA RTX PRO Blackwell GPU Architecture whitepaper",
    }
)


def _gpu(
    key: str,
    name: str,
    family: _Family,
    *,
    sms: int,
    l2_mib: float,
    smi_mib: int,
    runtime_gib: float | None,
    bandwidth_gb: float,
    fp32: float,
    seen: str = "",
    link_gb: float | None = None,
) -> GPU:
    rates = {"fp32": 1.0, **family.rates}
    return GPU(
        key=key,
        name=name,
        compute_capability=family.compute_capability,
        sm_count=sms,
        nvml_total_bytes=smi_mib * MIB,
        runtime_total_bytes=int(runtime_gib * GIB) if runtime_gib else int(smi_mib * MIB * _RUNTIME_SHARE),
        context_bytes=family.context_mib * MIB,
        l2_bytes=int(l2_mib * MIB),
        bandwidth_bytes_per_second=bandwidth_gb * 1e9,
        peak_flops=MappingProxyType({dtype: rate * fp32 * 1e12 for dtype, rate in rates.items()}),
        host_link_bytes_per_second=(link_gb or family.link_gb) * 1e9,
        sources=MappingProxyType(
            {
                "nvml_total_bytes": "nvidia-smi",
                "runtime_total_bytes": seen or _ESTIMATED_RUNTIME,
                "peak_flops": family.rate_source,
                "context_bytes": family.context_source,
            }
        ),
    )


_GPUS = (
    # fmt: off
    # Turing
    _gpu(
        "t4-16gb",
        "Tesla T4",
        _TESLA_T4,
        sms=40,
        l2_mib=4,
        smi_mib=15360,
        runtime_gib=14.56,
        bandwidth_gb=320,
        fp32=8.1,
        seen="out-of-memory message in Zheng-Chong/CatVTON#133",
    ),
    _gpu(
        "rtx2080ti-11gb",
        "NVIDIA GeForce RTX 2080 Ti",
        _TURING,
        sms=68,
        l2_mib=5.5,
        smi_mib=11264,
        runtime_gib=10.75,
        bandwidth_gb=616,
        fp32=13.45,
    ),
    # Ampere
    _gpu(
        "rtx3060-12gb",
        "NVIDIA GeForce RTX 3060",
        _AMPERE_GEFORCE,
        sms=28,
        l2_mib=3,
        smi_mib=12288,
        runtime_gib=11.66,
        bandwidth_gb=360,
        fp32=12.74,
    ),
    _gpu(
        "rtx3070-8gb",
        "NVIDIA GeForce RTX 3070",
        _AMPERE_GEFORCE,
        sms=46,
        l2_mib=4,
        smi_mib=8192,
        runtime_gib=7.66,
        bandwidth_gb=448,
        fp32=20.31,
    ),
    _gpu(
        "rtx3080-10gb",
        "NVIDIA GeForce RTX 3080",
        _AMPERE_GEFORCE,
        sms=68,
        l2_mib=5,
        smi_mib=10240,
        runtime_gib=9.67,
        bandwidth_gb=760,
        fp32=29.77,
    ),
    _gpu(
        "rtx3090-24gb",
        "NVIDIA GeForce RTX 3090",
        _AMPERE_GEFORCE,
        sms=82,
        l2_mib=6,
        smi_mib=24576,
        runtime_gib=23.57,
        bandwidth_gb=936,
        fp32=35.58,
    ),
    _gpu(
        "a10-24gb",
        "NVIDIA A10",
        _AMPERE_PRO,
        sms=72,
        l2_mib=6,
        smi_mib=23028,
        runtime_gib=21.98,
        bandwidth_gb=600,
        fp32=31.24,
    ),
    _gpu(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        _GA100,
        sms=108,
        l2_mib=40,
        smi_mib=40960,
        runtime_gib=39.49,
        bandwidth_gb=1555,
        fp32=19.49,
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB",
        _GA100,
        sms=108,
        l2_mib=40,
        smi_mib=81920,
        runtime_gib=79.25,
        bandwidth_gb=2039,
        fp32=19.49,
    ),
    # Ada Lovelace
    _gpu(
        "rtx4090-24gb",
        "NVIDIA GeForce RTX 4090",
        _ADA_GEFORCE,
        sms=128,
        l2_mib=72,
        smi_mib=24564,
        runtime_gib=23.52,
        bandwidth_gb=1008,
        fp32=82.58,
    ),
    _gpu(
        "l4-24gb",
        "NVIDIA L4",
        _ADA_PRO,
        sms=58,
        l2_mib=48,
        smi_mib=23034,
        runtime_gib=22.03,
        bandwidth_gb=300,
        fp32=30.29,
    ),
    _gpu(
        "l40s-48gb",
        "NVIDIA L40S",
        _ADA_PRO,
        sms=142,
        l2_mib=96,
        smi_mib=46068,
        runtime_gib=44.39,
        bandwidth_gb=864,
        fp32=91.61,
    ),
    # Hopper
    _gpu(
        "h100-80gb",
        "NVIDIA H100 80GB HBM3",
        _HOPPER,
        sms=132,
        l2_mib=50,
        smi_mib=81559,
        runtime_gib=79.11,
        bandwidth_gb=3352,
        fp32=66.9,
    ),
    _gpu(
        "h200-141gb",
        "NVIDIA H200",
        _HOPPER,
        sms=132,
        l2_mib=50,
        smi_mib=143771,
        runtime_gib=139.72,
        bandwidth_gb=4800,
        fp32=66.9,
    ),
    # Blackwell
    _gpu(
        "b200-180gb",
        "NVIDIA B200",
        _BLACKWELL_DATACENTER,
        sms=148,
        l2_mib=126,
        smi_mib=183359,
        runtime_gib=178.35,
        bandwidth_gb=8000,
        fp32=75,
    ),
    _gpu(
        "rtx5090-32gb",
        "NVIDIA GeForce RTX 5090",
        _BLACKWELL_GEFORCE,
        sms=170,
        l2_mib=96,
        smi_mib=32607,
        runtime_gib=31.36,
        bandwidth_gb=1792,
        fp32=104.8,
        seen="out-of-memory message in TrajectoryCrafter/TrajectoryCrafter#20",
    ),
    # fmt: on
)

CATALOGUE: Mapping[str, GPU] = MappingProxyType({gpu.key: gpu for gpu in _GPUS})
"""Every GPU that memfit knows, by key."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "t4": "t4-16gb",
        "2080ti": "rtx2080ti-11gb",
        "3060": "rtx3060-12gb",
        "3070": "rtx3070-8gb",
        "3080": "rtx3080-10gb",
        "3090": "rtx3090-24gb",
        "a10": "a10-24gb",
        "a100": "a100-80gb",
        "4090": "rtx4090-24gb",
        "l4": "l4-24gb",
        "l40s": "l40s-48gb",
        "h100": "h100-80gb",
        "h200": "h200-141gb",
        "b200": "b200-180gb",
        "5090": "rtx5090-32gb",
    }
)
"""Other usual names; where a name comes in several sizes, the larger one that rented machines have."""

NOT_SUPPORTED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("v100", "v10016gb", "v10032gb", "p100", "titanv", "1080ti", "gtx1080ti"),
        "PyTorch's CUDA 13 builds have no kernels for its architecture (before sm_75)",
    )
)
"""GPUs that people ask for and that the dry run cannot stand in for, with the reason."""
