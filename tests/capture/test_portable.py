"""The portable engine: results like the dry run's, out of memory as a value, graphs, nothing left over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memfit.capture.cuda_temporaries import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES, reduction_buffers
from memfit.capture.graph import StepGraph
from memfit.capture.portable import DEVICE, capture_portable, measure_portable, portable_gpu
from memfit.capture.step import build_step
from memfit.capture.workloads import workload_reference
from memfit.core.devices import find_gpu
from memfit.core.trace import Trace
from memfit.core.workload import Workload
from memfit.dryrun.result import DryRunResult

MIB = 1 << 20
RTX3060, H100 = find_gpu("rtx3060-12gb"), find_gpu("h100-80gb")


def toy(width: int = 256, precision: str = "fp32") -> Workload:
    return Workload(
        name="toy",
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, 10)
        ),
        batch=lambda: (torch.randn(32, width), torch.zeros(32, dtype=torch.long)),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        precision=precision,  # type: ignore[arg-type]
    )


def test_result_has_the_dry_runs_keys() -> None:
    result = measure_portable(workload_reference(toy()), gpu_key="rtx3060-12gb", categories=True)
    assert (result["engine"], result["oom"], result["steps_done"]) == ("portable", None, 3)
    assert result["peak_requested_bytes"] <= result["peak_allocated_bytes"] <= result["peak_reserved_bytes"]
    assert result["device_total_bytes"] == RTX3060.context_bytes + result["peak_reserved_bytes"]
    assert sum(result["peak_by_category"].values()) == result["peak_requested_bytes"]
    assert result["flops"] > 0 and result["step_seconds"] > 0
    known = DryRunResult.__dataclass_fields__
    missing = {
        "gpu",
        "torch",
        "nvml_total_bytes",
        "runtime_total_bytes",
        "value_reads",
        "not_modelled",
    } - set(result)
    assert not missing
    value = DryRunResult(
        **{key: part for key, part in result.items() if key in known and key not in ("oom",)}
    )
    assert value.fits


def test_trace_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "step.memfit-trace"
    measure_portable(workload_reference(toy()), gpu_key="rtx3060-12gb", costs=False, trace_path=str(path))
    assert len(Trace.load(path)) > 50


@pytest.mark.parametrize(("gpu", "workspace"), [(RTX3060, WORKSPACE_BYTES), (H100, HOPPER_WORKSPACE_BYTES)])
def test_each_thread_has_its_workspace(gpu, workspace: int) -> None:  # type: ignore[no-untyped-def]
    with portable_gpu(gpu):
        step = build_step(toy(), device=DEVICE)
        resting = torch.cuda.memory_stats()["requested_bytes.all.current"]
        step.run()
        state = 2 * resting - 2 * 32 * (
            4 * 256 + 8
        )  # AdamW keeps two of each parameter, and none of the batch
        now = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert now - resting - state == 2 * workspace


def test_out_of_memory_is_a_value() -> None:
    small = "1GiB,sm86"
    gpu = find_gpu(small)
    result = measure_portable(workload_reference(toy(8192)), gpu_key=small)
    assert result["oom"] is not None and result["steps_done"] == 0
    assert result["peak_reserved_bytes"] <= gpu.runtime_total_bytes - gpu.context_bytes
    assert "Tried to allocate" in result["oom"]["message"]


def test_techniques_are_put_on_before_the_steps() -> None:
    def only_one(step) -> None:  # type: ignore[no-untyped-def]
        step.model[0].requires_grad_(False)

    plain = measure_portable(workload_reference(toy()), gpu_key="rtx3060-12gb", costs=False)
    changed = measure_portable(workload_reference(toy()), gpu_key="rtx3060-12gb", costs=False, apply=only_one)
    assert changed["peak_requested_bytes"] < plain["peak_requested_bytes"]


@pytest.mark.parametrize("precision", ["bf16-autocast", "fp16-autocast"])
def test_lower_precision_runs(precision: str) -> None:
    result = measure_portable(workload_reference(toy(precision=precision)), gpu_key="a100-80gb", costs=False)
    assert result["oom"] is None and result["steps_done"] == 3


def test_captures_the_step_graph() -> None:
    graph = StepGraph.from_json(capture_portable(workload_reference(toy()), gpu_key="rtx3060-12gb"))
    assert graph.device == "meta" and graph.flops > 0
    assert {"_foreach_lerp_" in op.name for op in graph.ops} == {True, False}


def test_allocator_settings_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with portable_gpu(RTX3060) as portable:
        build_step(toy(), device=DEVICE)
        assert portable.memory.allocator.settings.expandable_segments
        assert torch.cuda.memory_stats()["segment.all.current"] == 0


def test_memory_functions_speak_of_the_imitated_gpu_only_inside() -> None:
    before = torch.cuda.memory_stats
    with portable_gpu(replace(RTX3060, context_bytes=100 * MIB)):
        free, total = torch.cuda.mem_get_info()
        assert (total - free, total) == (100 * MIB, RTX3060.runtime_total_bytes)
        block = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 30 * MIB
        del block
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.empty(3, device=DEVICE).cpu().tolist() == [0.0, 0.0, 0.0]
    assert torch.cuda.memory_stats is before


@pytest.mark.parametrize(
    ("shape", "dims", "gpu", "size_bytes"),
    [
        # What a CUDA build took on the made-up GPU.
        ((8192, 768), (0,), RTX3060, 22_020_120),
        ((8192, 3072), (0,), RTX3060, 22_020_192),
        ((8192, 2304), (0,), RTX3060, 22_413_384),
        ((8, 512, 512), (0, 1), RTX3060, 16_777_232),
        ((8192, 768), (0,), H100, 50_331_672),
        ((8192, 3072), (0,), H100, 138_412_128),
        ((1, 2048, 2048), (0, 1), H100, 33_554_496),
        ((16, 768), (0,), H100, 0),
    ],
)
def test_buffers_of_reductions(shape, dims, gpu, size_bytes: int) -> None:  # type: ignore[no-untyped-def]
    assert sum(reduction_buffers(torch.empty(shape, device="meta"), dims, gpu)) == size_bytes


def test_inference_mode_runs_composed_operators_by_their_parts() -> None:
    with portable_gpu(RTX3060), torch.inference_mode():
        weight, x = torch.empty(1024, 1024, device=DEVICE), torch.empty(64, 1024, device=DEVICE)
        before = torch.cuda.memory_allocated()
        out = torch.einsum("ab,cb->ac", x, weight)
        assert torch.cuda.memory_allocated() - before == WORKSPACE_BYTES + out.nbytes


@pytest.mark.parametrize(
    ("mode", "kept_bytes"),
    [(torch.inference_mode, 0), (torch.no_grad, 2 * MIB), (torch.enable_grad, 2 * MIB)],
)
def test_autocast_keeps_cast_weights_except_in_inference_mode(mode: object, kept_bytes: int) -> None:
    with portable_gpu(RTX3060):
        weight = torch.nn.Parameter(torch.empty(1024, 1024, device=DEVICE))
        x = torch.empty(64, 1024, device=DEVICE)
        torch.nn.functional.linear(x, weight)  # takes cuBLAS's workspace
        before = torch.cuda.memory_allocated()
        with mode(), torch.autocast("cuda", torch.bfloat16):  # type: ignore[operator]
            torch.nn.functional.linear(x, weight)
            assert torch.cuda.memory_allocated() - before == kept_bytes
