"""The GPUs that memfit knows, each figure with its source.

What is said once per family: capability, the ratios of the tensor-core rates to fp32, the link to the host,
and what a process holds before its first tensor. Per GPU: the two totals, bandwidth, fp32 rate, SMs, L2.

`nvml_total_bytes` are MiB as nvidia-smi prints them. `runtime_total_bytes` are GiB as out-of-memory messages
print them ("GPU 0 has a total capacity of 23.52 GiB"), so they are known to 0.005 GiB. Drivers since 570 keep
more for themselves than older ones did (an RTX 4090 had 23.65 GiB with 525 and has 23.52 GiB with 595), so
the lowest figure that was found is taken. Where none was found, `_driver_reserve_mib` is subtracted from the
nvidia-smi total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from memfit.core.devices import GPU
from memfit.core.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What GPUs of one family have in common.

    ``rates`` are dense tensor-core FLOP/s with fp32 accumulation, as multiples of the fp32 rate. GeForce
    cards of one chip have half the rate of the professional ones.
    """

    compute_capability: tuple[int, int]
    rates: Mapping[str, float]
    link_gb: float
    context_mib: int
    context: str
    document: str


_TURING = _Family(
    compute_capability=(7, 5),
    rates={"fp16": 4},
    link_gb=15.75,
    context_mib=240,
    context="240 MiB of an idle process on a T4, out-of-memory message in Zheng-Chong/CatVTON#133",
    document="NVIDIA Turing GPU Architecture whitepaper (WP-09183)",
)
_T4 = replace(_TURING, rates={"fp16": 8}, document="NVIDIA T4 datasheet")
_GA100 = _Family(
    compute_capability=(8, 0),
    rates={"tf32": 8, "fp16": 16, "bf16": 16},
    link_gb=31.5,
    context_mib=414,
    context="414 MiB of an idle process on an 80 GB card, in a public out-of-memory message",
    document="NVIDIA A100 Tensor Core GPU Architecture whitepaper, NVIDIA A100 and A30 datasheets",
)
_AMPERE_GEFORCE = _Family(
    compute_capability=(8, 6),
    rates={"tf32": 1, "fp16": 2, "bf16": 2},
    link_gb=31.5,
    context_mib=320,
    context="300-odd MB with lazily loaded kernels, pytorch/pytorch#107667",
    document="NVIDIA Ampere GA102 GPU Architecture whitepaper, GeForce RTX 30 specifications",
)
_AMPERE_PRO = replace(
    _AMPERE_GEFORCE,
    rates={"tf32": 2, "fp16": 4, "bf16": 4},
    document="NVIDIA Ampere GA102 GPU Architecture whitepaper, NVIDIA datasheet of the card",
)
_ADA_GEFORCE = _Family(
    compute_capability=(8, 9),
    rates={"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4},
    link_gb=31.5,
    context_mib=470,
    context="426 MiB bare with torch 2.10+cu130 (unslothai/unsloth-zoo#1053), 470 MiB with kernels loaded "
    "(3DTopia/Phidias-Diffusion#8)",
    document="NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 40 specifications",
)
_ADA_PRO = replace(
    _ADA_GEFORCE,
    rates={"tf32": 2, "fp16": 4, "bf16": 4, "fp8": 8},
    document="NVIDIA Ada GPU Architecture whitepaper, NVIDIA datasheet of the card",
)
_HOPPER = _Family(
    compute_capability=(9, 0),
    rates={"tf32": 7.394, "fp16": 14.79, "bf16": 14.79, "fp8": 29.58},
    link_gb=63.0,
    context_mib=612,
    context="612 MiB of an idle process on an H200, in a public out-of-memory message",
    document="NVIDIA H100 Tensor Core GPU Architecture whitepaper, NVIDIA H100 and H200 datasheets",
)
_BLACKWELL = _Family(
    compute_capability=(10, 0),
    rates={"tf32": 15, "fp16": 30, "bf16": 30, "fp8": 60},
    link_gb=63.0,
    context_mib=612,
    context="estimated: as Hopper",
    document="NVIDIA Blackwell Architecture Technical Brief, HGX B200 datasheet",
)
_BLACKWELL_GEFORCE = _Family(
    compute_capability=(12, 0),
    rates={"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4},
    link_gb=63.0,
    context_mib=503,
    context="503 MiB of an idle process on an RTX 5090, out-of-memory message in Ksuriuri/index-tts-vllm#91",
    document="NVIDIA RTX Blackwell GPU Architecture whitepaper, GeForce RTX 50 specifications",
)
_BLACKWELL_PRO = replace(
    _BLACKWELL_GEFORCE,
    rates={"tf32": 2, "fp16": 4, "bf16": 4, "fp8": 8},
    document="NVIDIA RTX PRO Blackwell GPU Architecture whitepaper",
)

_H100_NVL_RATES = {"tf32": 6.92, "fp16": 13.85, "bf16": 13.85, "fp8": 27.7}
"""Its tensor cores run at a lower clock than its fp32 units (NVIDIA H100 NVL datasheet)."""


def _driver_reserve_mib(smi_mib: int) -> float:
    """What the driver keeps for itself, going by the cards below whose totals are known (380 to 780 MiB)."""
    return 380 + 0.004 * smi_mib


def _gpu(
    key: str,
    name: str,
    family: _Family,
    *,
    sms: int,
    l2_mib: float,
    smi_mib: int,
    bandwidth_gb: float,
    fp32_tflops: float,
    runtime_gib: float | None = None,
    seen: str = "",
    link_gb: float | None = None,
) -> GPU:
    """One row of the catalogue; ``seen`` is where ``runtime_gib`` was read."""
    estimated_gib = (smi_mib - _driver_reserve_mib(smi_mib)) / 1024
    rule = "the nvidia-smi total less what recent drivers keep for themselves"
    found = bool(seen) and not seen.startswith("as ")
    rates = {"fp32": 1.0, **family.rates}
    return GPU(
        key=key,
        name=name,
        compute_capability=family.compute_capability,
        sm_count=sms,
        nvml_total_bytes=smi_mib * MIB,
        runtime_total_bytes=int((runtime_gib or estimated_gib) * GIB),
        context_bytes=family.context_mib * MIB,
        l2_bytes=int(l2_mib * MIB),
        bandwidth_bytes_per_second=bandwidth_gb * 1e9,
        peak_flops=MappingProxyType({dtype: rate * fp32_tflops * 1e12 for dtype, rate in rates.items()}),
        host_link_bytes_per_second=(link_gb or family.link_gb) * 1e9,
        sources=MappingProxyType(
            {
                "nvml_total_bytes": "nvidia-smi listing of the card",
                "runtime_total_bytes": f"seen: {seen}" if found else f"estimated: {seen or rule}",
                "context_bytes": family.context,
                "peak_flops": family.document,
                "specification": family.document,
            }
        ),
    )


# fmt: off
_GPUS = (
    # Turing
    _gpu("t4-16gb", "Tesla T4", _T4,
         sms=40, l2_mib=4, smi_mib=15360, bandwidth_gb=320, fp32_tflops=8.1,
         runtime_gib=14.56, seen="Zheng-Chong/CatVTON#133 (14.75 with older drivers)"),
    _gpu("rtx2080ti-11gb", "NVIDIA GeForce RTX 2080 Ti", _TURING,
         sms=68, l2_mib=5.5, smi_mib=11264, bandwidth_gb=616, fp32_tflops=13.45),
    # Ampere, GeForce
    _gpu("rtx3060-12gb", "NVIDIA GeForce RTX 3060", _AMPERE_GEFORCE,
         sms=28, l2_mib=3, smi_mib=12288, bandwidth_gb=360, fp32_tflops=12.74,
         runtime_gib=11.63, seen="a 12,288 MiB card whose driver keeps 380 MiB;"
              " 11.66 in FireRedTeam/FireRedTTS2#17"),
    _gpu("rtx3070-8gb", "NVIDIA GeForce RTX 3070", _AMPERE_GEFORCE,
         sms=46, l2_mib=4, smi_mib=8192, bandwidth_gb=448, fp32_tflops=20.31),
    _gpu("rtx3080-10gb", "NVIDIA GeForce RTX 3080", _AMPERE_GEFORCE,
         sms=68, l2_mib=5, smi_mib=10240, bandwidth_gb=760, fp32_tflops=29.77,
         runtime_gib=9.62, seen="public run logs on RTX 3080 (9.62 to 9.65);"
              " 9.78 with older drivers in zai-org/CogVideo#34"),
    _gpu("rtx3090-24gb", "NVIDIA GeForce RTX 3090", _AMPERE_GEFORCE,
         sms=82, l2_mib=6, smi_mib=24576, bandwidth_gb=936, fp32_tflops=35.58,
         runtime_gib=23.56, seen="public run log on RTX 3090; 23.70 with older drivers in GaoLii/DSP#10"),
    # Ampere, professional
    _gpu("a4000-16gb", "NVIDIA RTX A4000", _AMPERE_PRO,
         sms=48, l2_mib=4, smi_mib=16376, bandwidth_gb=448, fp32_tflops=19.17,
         runtime_gib=15.61, seen="DengKaiCQ/VGGT-Long#6"),
    _gpu("a5000-24gb", "NVIDIA RTX A5000", _AMPERE_PRO,
         sms=64, l2_mib=6, smi_mib=24564, bandwidth_gb=768, fp32_tflops=27.77),
    _gpu("a6000-48gb", "NVIDIA RTX A6000", _AMPERE_PRO,
         sms=84, l2_mib=6, smi_mib=49140, bandwidth_gb=768, fp32_tflops=38.71,
         runtime_gib=47.4, seen="public run logs on A6000"),
    _gpu("a10-24gb", "NVIDIA A10", _AMPERE_PRO,
         sms=72, l2_mib=6, smi_mib=23028, bandwidth_gb=600, fp32_tflops=31.24,
         runtime_gib=21.99, seen="zai-org/CogVLM#236"),
    _gpu("a10g-24gb", "NVIDIA A10G", _AMPERE_GEFORCE,
         sms=80, l2_mib=6, smi_mib=23028, bandwidth_gb=600, fp32_tflops=35.0,
         runtime_gib=21.99, seen="as NVIDIA A10, of the same nvidia-smi total"),
    _gpu("a40-48gb", "NVIDIA A40", _AMPERE_PRO,
         sms=84, l2_mib=6, smi_mib=46068, bandwidth_gb=696, fp32_tflops=37.42,
         runtime_gib=44.39, seen="as NVIDIA L40S, of the same nvidia-smi total"),
    # Ampere, data centre
    _gpu("a30-24gb", "NVIDIA A30", _GA100,
         sms=56, l2_mib=24, smi_mib=24576, bandwidth_gb=933, fp32_tflops=10.32,
         runtime_gib=23.53, seen="google/RB-Modulation#5"),
    _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", _GA100,
         sms=108, l2_mib=40, smi_mib=40960, bandwidth_gb=1555, fp32_tflops=19.49,
         runtime_gib=39.5, seen="TianheWu/CoSeR#10"),
    _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", _GA100,
         sms=108, l2_mib=40, smi_mib=81920, bandwidth_gb=2039, fp32_tflops=19.49,
         runtime_gib=79.14, seen="lianqi1008/Control-GIC#6; 79.25 in levihsu/OOTDiffusion#235"),
    _gpu("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", _GA100,
         sms=108, l2_mib=40, smi_mib=81920, bandwidth_gb=1935, fp32_tflops=19.49,
         runtime_gib=79.14, seen="as NVIDIA A100-SXM4-80GB"),
    # Ada, GeForce
    _gpu("rtx4060-8gb", "NVIDIA GeForce RTX 4060", _ADA_GEFORCE,
         sms=24, l2_mib=24, smi_mib=8188, bandwidth_gb=272, fp32_tflops=15.11, link_gb=15.75,
         runtime_gib=7.747, seen="8,318,222,336 B in the released results of xMem"),
    _gpu("rtx4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti", _ADA_GEFORCE,
         sms=34, l2_mib=32, smi_mib=16380, bandwidth_gb=288, fp32_tflops=22.06, link_gb=15.75),
    _gpu("rtx4070-12gb", "NVIDIA GeForce RTX 4070", _ADA_GEFORCE,
         sms=46, l2_mib=36, smi_mib=12282, bandwidth_gb=504, fp32_tflops=29.15),
    _gpu("rtx4070tisuper-16gb", "NVIDIA GeForce RTX 4070 Ti SUPER", _ADA_GEFORCE,
         sms=66, l2_mib=48, smi_mib=16376, bandwidth_gb=672, fp32_tflops=44.1),
    _gpu("rtx4080-16gb", "NVIDIA GeForce RTX 4080", _ADA_GEFORCE,
         sms=76, l2_mib=64, smi_mib=16376, bandwidth_gb=717, fp32_tflops=48.74),
    _gpu("rtx4090-24gb", "NVIDIA GeForce RTX 4090", _ADA_GEFORCE,
         sms=128, l2_mib=72, smi_mib=24564, bandwidth_gb=1008, fp32_tflops=82.58,
         runtime_gib=23.52, seen="public run logs on RTX 4090, driver 595;"
              " 23.64 with older ones in ali-vilab/VGen#104"),
    # Ada, professional and data centre
    _gpu("rtx6000ada-48gb", "NVIDIA RTX 6000 Ada Generation", _ADA_PRO,
         sms=142, l2_mib=96, smi_mib=49140, bandwidth_gb=960, fp32_tflops=91.06,
         runtime_gib=47.372, seen="by mem_get_info in unslothai/unsloth-zoo#1053, ECC off"),
    _gpu("l4-24gb", "NVIDIA L4", _ADA_PRO,
         sms=58, l2_mib=48, smi_mib=23034, bandwidth_gb=300, fp32_tflops=30.29,
         runtime_gib=22.03, seen="public run logs on L4, torch 2.x"),
    _gpu("l40-48gb", "NVIDIA L40", _ADA_GEFORCE,
         sms=142, l2_mib=96, smi_mib=46068, bandwidth_gb=864, fp32_tflops=90.52,
         runtime_gib=44.4, seen="NVlabs/Eagle#68"),
    _gpu("l40s-48gb", "NVIDIA L40S", _ADA_PRO,
         sms=142, l2_mib=96, smi_mib=46068, bandwidth_gb=864, fp32_tflops=91.61,
         runtime_gib=44.39, seen="public run logs on L40S, torch 2.x"),
    # Hopper
    _gpu("h100-80gb", "NVIDIA H100 80GB HBM3", _HOPPER,
         sms=132, l2_mib=50, smi_mib=81559, bandwidth_gb=3352, fp32_tflops=66.91,
         runtime_gib=79.11, seen="vllm-project/vllm#27508"),
    _gpu("h100-pcie-80gb", "NVIDIA H100 PCIe", _HOPPER,
         sms=114, l2_mib=50, smi_mib=81559, bandwidth_gb=2039, fp32_tflops=51.22,
         runtime_gib=79.11, seen="as NVIDIA H100 80GB HBM3"),
    _gpu("h100-nvl-94gb", "NVIDIA H100 NVL", replace(_HOPPER, rates=_H100_NVL_RATES),
         sms=132, l2_mib=50, smi_mib=95830, bandwidth_gb=3938, fp32_tflops=60.32,
         runtime_gib=93.0, seen="ali-vilab/VACE#56"),
    _gpu("h200-141gb", "NVIDIA H200", _HOPPER,
         sms=132, l2_mib=50, smi_mib=143771, bandwidth_gb=4800, fp32_tflops=66.91,
         runtime_gib=139.72, seen="public run logs (139.72 to 139.81)"),
    # Blackwell
    _gpu("b200-180gb", "NVIDIA B200", _BLACKWELL,
         sms=148, l2_mib=126, smi_mib=183359, bandwidth_gb=8000, fp32_tflops=75.0,
         runtime_gib=178.35, seen="public run logs (178.35 and 178.36)"),
    _gpu("rtx5060ti-16gb", "NVIDIA GeForce RTX 5060 Ti", _BLACKWELL_GEFORCE,
         sms=36, l2_mib=32, smi_mib=16311, bandwidth_gb=448, fp32_tflops=23.7, link_gb=31.5,
         runtime_gib=15.48, seen="public run logs on RTX 5060 Ti (15.48, 15.49)"),
    _gpu("rtx5070ti-16gb", "NVIDIA GeForce RTX 5070 Ti", _BLACKWELL_GEFORCE,
         sms=70, l2_mib=48, smi_mib=16303, bandwidth_gb=896, fp32_tflops=43.94,
         runtime_gib=15.47, seen="as NVIDIA GeForce RTX 5080, of the same nvidia-smi total"),
    _gpu("rtx5080-16gb", "NVIDIA GeForce RTX 5080", _BLACKWELL_GEFORCE,
         sms=84, l2_mib=64, smi_mib=16303, bandwidth_gb=960, fp32_tflops=56.28,
         runtime_gib=15.47, seen="public run log on RTX 5080, torch 2.x"),
    _gpu("rtx5090-32gb", "NVIDIA GeForce RTX 5090", _BLACKWELL_GEFORCE,
         sms=170, l2_mib=96, smi_mib=32607, bandwidth_gb=1792, fp32_tflops=104.8,
         runtime_gib=31.36, seen="TrajectoryCrafter/TrajectoryCrafter#20"),
    _gpu("rtxpro6000-96gb", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", _BLACKWELL_PRO,
         sms=188, l2_mib=128, smi_mib=97887, bandwidth_gb=1792, fp32_tflops=125.0,
         runtime_gib=94.97, seen="total in antirez/ds4#431"),
)
# fmt: on

CATALOGUE: Mapping[str, GPU] = MappingProxyType({gpu.key: gpu for gpu in _GPUS})
"""Every GPU that memfit knows, by key."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{key.rsplit("-", 1)[0].removeprefix("rtx"): key for key in CATALOGUE},
        "a100": "a100-80gb",
        "a100pcie": "a100-pcie-80gb",
        "h100sxm": "h100-80gb",
        "rtxa4000": "a4000-16gb",
        "rtxa5000": "a5000-24gb",
        "rtxa6000": "a6000-48gb",
        "6000ada": "rtx6000ada-48gb",
        "pro6000": "rtxpro6000-96gb",
        "nvidia rtx pro 6000 blackwell server edition": "rtxpro6000-96gb",
        "h200 sxm": "h200-141gb",
    }
)
"""Other usual names. A name that comes in several sizes means the larger one, which rented machines have."""

NOT_SUPPORTED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("v100", "v10016gb", "v10032gb", "p100", "p4", "k80", "m40", "titanv", "1080ti", "gtx1080ti", "1080"),
        "PyTorch's CUDA 13 builds have no kernels for its architecture (before sm_75)",
    )
)
"""GPUs that people ask for and that the dry run cannot stand in for, with the reason."""
