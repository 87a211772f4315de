"""The portable engine against recorded training runs of a CUDA build: peaks of three steps, job by job."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfit.capture.portable import DEVICE, portable_gpu
from memfit.core.devices import find_gpu

TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "data" / "golden_train"
NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz")))
GPUS = {80: "a100-80gb", 90: "h100-80gb"}
MOST_RESERVED_PERCENT = 2.0


def _jobs() -> ModuleType:
    """The models and jobs of the recorded runs; a script, so no module that can be imported by name."""
    path = TESTS / "dryrun" / "golden_training.py"
    spec = importlib.util.spec_from_file_location("golden_training_jobs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


golden_training = _jobs()


@contextmanager
def attention_forced(job: Any) -> Iterator[None]:
    """Only the kernel that the job's name forces, if it forces one."""
    switches = ("flash", "cudnn", "mem_efficient", "math")
    before = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in switches}
    golden_training.force_attention(job)
    try:
        yield
    finally:
        for name, enabled in before.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with its tensors moved in the order in which ``cuda()`` moves them, tied as before."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(DEVICE)
        return copies[id(tensor)]

    model._apply(copy_of)
    if hasattr(model, "tok"):
        model.head.weight = model.tok.weight
    return model


def run(name: str) -> list[dict[str, int]]:
    """Peaks of the three steps on the imitated GPU."""
    job = golden_training.Job.named(name)
    gpu = find_gpu(GPUS[job.compute_capability])
    model = golden_training.MODELS[job.model](job)
    inputs, labels = model.example(job.batch)
    steps = []
    with attention_forced(job), portable_gpu(gpu, settings=job.allocator_settings):
        model = moved(model)
        optimizer = torch.optim.AdamW(
            model.parameters(), foreach=job.optimizer == "foreach", fused=job.optimizer == "fused"
        )
        x, y = inputs.to(DEVICE), labels.to(DEVICE)
        for _ in range(golden_training.STEPS):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=job.autocast):
                out = model(x)
                loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
            del out
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            statistics = torch.cuda.memory_stats()
            steps.append(
                {
                    "peak_requested": statistics["requested_bytes.all.peak"],
                    "after_requested": statistics["requested_bytes.all.current"],
                    "peak_to_optimizer": statistics["allocated_bytes.all.peak"],
                    "peak_reserved": statistics["reserved_bytes.all.peak"],
                }
            )
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_a_cuda_build(name: str) -> None:
    truth = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))["steps"]
    for number, (got, want) in enumerate(zip(run(name), truth, strict=True)):
        print(number, {key: got[key] - want[key] for key in got})
        assert got["peak_requested"] == want["peak_requested"], f"step {number}"
        assert got["after_requested"] == want["after_requested"], f"step {number}"
        share = 100 * abs(got["peak_reserved"] / want["peak_reserved"] - 1)
        assert share <= MOST_RESERVED_PERCENT, f"step {number}: {share:.2f} %"
