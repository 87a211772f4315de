"""The catalogue holds together, and GPUs are found by the names people use."""

from __future__ import annotations

import pytest

from memfit.core.catalogue import ALIASES, CATALOGUE
from memfit.core.devices import DTYPES, GPU, SHARED_MEMORY_PER_BLOCK_BYTES, find_gpu
from memfit.core.errors import UsageError

GIB = 2**30
gpus = pytest.mark.parametrize("gpu", CATALOGUE.values(), ids=list(CATALOGUE))


def test_there_are_the_gpus_that_people_use() -> None:
    assert len(CATALOGUE) >= 25


@gpus
def test_totals_shrink_from_nvidia_smi_to_budget(gpu: GPU) -> None:
    assert gpu.nvml_total_bytes > gpu.runtime_total_bytes > gpu.default_budget_bytes > 0
    assert 0.94 < gpu.runtime_total_bytes / gpu.nvml_total_bytes < 1
    assert 0.1 * GIB < gpu.context_bytes < 1 * GIB
    left = gpu.runtime_total_bytes - gpu.context_bytes - gpu.default_budget_bytes
    assert left == pytest.approx(0.02 * gpu.runtime_total_bytes, abs=1)


@gpus
def test_the_size_in_the_key_is_the_size(gpu: GPU) -> None:
    named = int(gpu.key.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.9 < gpu.nvml_total_bytes / GIB / named < 1.01


@gpus
def test_rates_are_ordered_as_the_chips_are(gpu: GPU) -> None:
    rates = gpu.peak_flops
    assert set(rates) <= set(DTYPES)
    ordered = [rates[dtype] for dtype in DTYPES if dtype in rates and dtype != "bf16"]
    assert ordered == sorted(ordered)
    assert rates["fp32"] > 1e12
    assert ("bf16" in rates) == ("tf32" in rates) == (gpu.compute_capability >= (8, 0))
    assert ("fp8" in rates) == (gpu.compute_capability >= (8, 9))
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]


@gpus
def test_fp32_rate_is_what_the_sms_can_do(gpu: GPU) -> None:
    """Two FLOP for each of 64 or 128 lanes of an SM at a clock that such chips run at."""
    lanes = 64 if gpu.compute_capability in [(7, 5), (8, 0)] else 128
    clock = gpu.peak_flops["fp32"] / (2 * lanes * gpu.sm_count)
    assert 1.2e9 < clock < 2.7e9


@gpus
def test_the_rest_is_within_reason(gpu: GPU) -> None:
    assert gpu.compute_capability in SHARED_MEMORY_PER_BLOCK_BYTES
    assert gpu.shared_memory_per_block_bytes == SHARED_MEMORY_PER_BLOCK_BYTES[gpu.compute_capability]
    assert 1 << 20 < gpu.l2_bytes < 256 << 20
    assert 100e9 < gpu.bandwidth_bytes_per_second < 10e12
    assert 10e9 < gpu.host_link_bytes_per_second < 100e9 < gpu.bandwidth_bytes_per_second
    assert gpu.architecture.startswith("sm_")


@gpus
def test_every_figure_names_its_source(gpu: GPU) -> None:
    figures = {"nvml_total_bytes", "runtime_total_bytes", "context_bytes", "peak_flops", "specification"}
    assert set(gpu.sources) == figures
    assert all(len(source) > 10 for source in gpu.sources.values())


@gpus
def test_is_found_by_its_key_and_its_own_name(gpu: GPU) -> None:
    for name in (gpu.key, gpu.key.upper(), f" {gpu.key} ", gpu.name, gpu.name.lower()):
        assert find_gpu(name) is gpu


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_is_found_by_other_names(alias: str, key: str) -> None:
    assert find_gpu(alias).key == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("3060", "rtx3060-12gb"),
        ("RTX 3060", "rtx3060-12gb"),
        ("rtx_3060", "rtx3060-12gb"),
        ("GeForce RTX 4090", "rtx4090-24gb"),
        ("a100", "a100-80gb"),
        ("A100-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100", "h100-80gb"),
        ("Tesla T4", "t4-16gb"),
    ],
)
def test_usual_spellings(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rtx3600-12gb", "rtx3060-12gb"),
        ("h100-80", "h100-80gb"),
        ("a10-80gb", "a100-80gb"),
        ("", "memfit gpus"),
        ("potato", "24GiB,sm89"),
        ("v100", "before sm_75"),
        ("24GiB", "24GiB,sm89"),
    ],
)
def test_unknown_names_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find_gpu(name)
    assert hint in str(refusal.value)
    assert repr(name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("architecture", ["sm89", "sm_89", "SM89", "8.9", "cc8.9", "89"])
def test_custom_gpu(architecture: str) -> None:
    gpu = find_gpu(f"24GiB,{architecture}")
    assert gpu.nvml_total_bytes == 24 * GIB
    assert gpu.compute_capability == (8, 9)
    assert gpu.architecture == "sm_89"
    assert 23 * GIB < gpu.runtime_total_bytes < 24 * GIB
    assert gpu.key == f"24GiB,{architecture}"


def test_custom_gpu_resembles_the_one_nearest_in_size() -> None:
    assert find_gpu("39GiB,sm80").peak_flops == CATALOGUE["a100-40gb"].peak_flops
    assert find_gpu("200GiB,sm90").sm_count == CATALOGUE["h200-141gb"].sm_count


def test_custom_gpu_of_an_architecture_that_no_other_has_resembles_its_generation() -> None:
    gpu = find_gpu("268GiB,sm103")
    assert (gpu.compute_capability, gpu.sm_count) == ((10, 3), CATALOGUE["b200-180gb"].sm_count)


def test_custom_gpu_with_settings() -> None:
    gpu = find_gpu("48GB, sm86, bandwidth=1TB/s, l2=48MiB, sms=84, bf16=150TFLOPS, fp32=38.5T")
    assert gpu.nvml_total_bytes == 48 * 10**9
    assert gpu.bandwidth_bytes_per_second == 1e12
    assert (gpu.l2_bytes, gpu.sm_count) == (48 << 20, 84)
    assert (gpu.peak_flops["bf16"], gpu.peak_flops["fp32"]) == (150e12, 38.5e12)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("24GiB,sm70", "it knows sm75"),
        ("24GiB,ampere", "'ampere' is not an architecture"),
        ("24GiB,", "'' is not an architecture"),
        ("24Gb,sm89", "may mean bits"),
        ("24,sm89", "has no unit"),
        ("100MiB,sm86", "less than a CUDA context"),
        ("24GiB,sm89,speed=9", "'speed=9' is not a setting"),
        ("24GiB,sm89,sms=0", "'sms=0' is not a setting"),
        ("24GiB,sm89,bf16=fast", "'fast' is not a rate"),
        ("24GiB,sm89,bandwidth=fast", "'fast' is not a size"),
    ],
)
def test_custom_gpu_refusals(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find_gpu(text)
    assert problem in str(refusal.value)
