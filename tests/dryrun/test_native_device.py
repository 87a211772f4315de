"""The made-up GPU says of itself what its environment says: properties, memory, NVML, errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from forked import Case, Outcome, run_cases

from memfit.core.catalogue import CATALOGUE
from memfit.core.devices import GPU, find_gpu
from memfit.dryrun.build import Stub, build_stub
from memfit.dryrun.environment import gpu_environment, gpu_settings, preloaded

pytestmark = pytest.mark.dryrun

GPU_UNDER_TEST = find_gpu("rtx3060-12gb")
MIB = 1 << 20

PROPERTIES = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps([p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory, p.L2_cache_size,
                  p.max_threads_per_multi_processor, p.shared_memory_per_block_optin]))
"""

MEMORY = """
import json, pynvml, torch
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
before = pynvml.nvmlDeviceGetMemoryInfo(handle)
untouched = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
info = pynvml.nvmlDeviceGetMemoryInfo(handle)
second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
process, = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
import os
print(json.dumps({
    "name": pynvml.nvmlDeviceGetName(handle), "count": pynvml.nvmlDeviceGetCount(),
    "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
    "utilization": torch.cuda.utilization(), "own": process.pid == os.getpid(),
    "reserved": torch.cuda.memory_reserved(), "free": free, "total": total, "untouched": untouched,
    "before": [before.total, before.used, before.free], "v1": [info.total, info.used, info.free],
    "v2": [second.total, second.used, second.free, second.reserved], "process": process.usedGpuMemory,
}))
"""

SHORTAGE = """
import torch
x = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
"""

SMALL = {
    "MEMFIT_GPU_TOTAL_BYTES": str(1024 * MIB),
    "MEMFIT_GPU_NVML_TOTAL_BYTES": str(1100 * MIB),
    "MEMFIT_GPU_CONTEXT_BYTES": str(100 * MIB),
}

CASES: Mapping[str, Case] = {
    **{f"properties {key}": Case(code=PROPERTIES, env=gpu_settings(gpu)) for key, gpu in CATALOGUE.items()},
    "memory": Case(code=MEMORY),
    "shortage": Case(code=SHORTAGE, env=SMALL),
    "no such device": Case(code="import torch; torch.ones(1, device='cuda:1')"),
    "hidden": Case(
        code="from torch import cuda; print(cuda.is_available(), cuda.device_count()); cuda.init()",
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "chosen": Case(code="import torch; print(torch.cuda.device_count())", env={"CUDA_VISIBLE_DEVICES": "0"}),
    "temperature": Case(code="import torch; torch.cuda.temperature()"),
    "untouched": Case(
        code="""
import ctypes, os, torch
library = ctypes.CDLL(None)
library.memfit_stats.restype = ctypes.c_char_p
assert b'"alive":false' in library.memfit_stats()
os.environ["MEMFIT_GPU_NAME"] = "Another GPU"
print(torch.cuda.get_device_name())
assert b'"alive":true' in library.memfit_stats()
"""
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(CASES, {**gpu_environment(GPU_UNDER_TEST), "OMP_NUM_THREADS": "1"})


def printed(outcomes: Mapping[str, Outcome], name: str) -> Any:
    assert outcomes[name].code == 0, outcomes[name].output
    return json.loads(outcomes[name].output.splitlines()[-1])


# CUDA C++ Programming Guide, technical specifications per compute capability.
THREADS_PER_SM = {
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1536,
    (8, 9): 1536,
    (9, 0): 2048,
    (10, 0): 2048,
    (12, 0): 1536,
}


@pytest.mark.parametrize("gpu", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_every_gpu_of_the_catalogue_is_what_it_says(gpu: GPU, outcomes: dict[str, Outcome]) -> None:
    assert printed(outcomes, f"properties {gpu.key}") == [
        gpu.name,
        list(gpu.compute_capability),
        gpu.sm_count,
        gpu.runtime_total_bytes,
        gpu.l2_bytes,
        THREADS_PER_SM[gpu.compute_capability],
        gpu.shared_memory_per_block_bytes,
    ]


def test_the_runtime_and_nvml_tell_one_account(outcomes: dict[str, Outcome]) -> None:
    told, gpu = printed(outcomes, "memory"), GPU_UNDER_TEST
    held = gpu.context_bytes + told["reserved"]
    kept_by_driver = gpu.nvml_total_bytes - gpu.runtime_total_bytes
    assert told["reserved"] == 100 * MIB
    assert (told["free"], told["total"]) == (gpu.runtime_total_bytes - held, gpu.runtime_total_bytes)
    assert told["before"] == [gpu.nvml_total_bytes, kept_by_driver, gpu.runtime_total_bytes]
    assert told["v1"] == [gpu.nvml_total_bytes, kept_by_driver + held, told["free"]]
    assert told["v2"] == [gpu.nvml_total_bytes, held, told["free"], kept_by_driver]
    assert (told["process"], told["own"], told["untouched"]) == (held, True, 0)
    assert (told["name"], told["count"], told["utilization"]) == (gpu.name, 1, 0)
    assert told["capability"] == list(gpu.compute_capability)


def test_a_shortage_has_the_right_numbers(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["shortage"].code == 1
    text = outcomes["shortage"].output
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB" in text
    assert "total capacity of 1024.00 MiB of which 412.00 MiB is free" in text
    assert "this process has 612.00 MiB memory in use" in text


def test_errors_have_cudas_own_words(outcomes: dict[str, Outcome]) -> None:
    assert "CUDA error: invalid device ordinal" in outcomes["no such device"].output
    assert "Not Supported" in outcomes["temperature"].output


def test_visible_devices(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["hidden"].output.splitlines()[0] == "False 0"
    assert outcomes["hidden"].code == 1
    assert outcomes["chosen"].output.strip() == "1"


def test_a_fork_that_has_not_touched_the_device_may_choose_it(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["untouched"].output.strip() == "Another GPU", outcomes["untouched"].output


# ------------------------------------------------------------------- the environment


def test_the_environment_keeps_what_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {
        "LD_PRELOAD": "/usr/lib/libjemalloc.so:/x.so",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "HOME": "/home/me",
    }
    env = gpu_environment(GPU_UNDER_TEST, base=base, addresses="firstfit", cudnn_workspace_bytes=7)
    stub = build_stub()
    assert env["LD_PRELOAD"] == f"{stub.cuda} {stub.nvml} /usr/lib/libjemalloc.so /x.so"
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["HOME"] == "/home/me"
    assert (env["MEMFIT_GPU_CC"], env["MEMFIT_ADDRESSES"], env["MEMFIT_CUDNN_WORKSPACE_BYTES"]) == (
        "86",
        "firstfit",
        "7",
    )
    assert base["CUDA_VISIBLE_DEVICES"] == "2,3", "the given mapping is not changed"


def test_preloading_twice_is_preloading_once() -> None:
    stub: Stub = build_stub()
    once = preloaded(stub, os.environ.get("LD_PRELOAD"))
    assert preloaded(stub, once) == once
