"""The device's memory as low, expected and high: what is exact, and what a calibration narrows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from forked import Case, Outcome, run_cases

from memfit.cli import main
from memfit.core.devices import find_gpu
from memfit.core.errors import InputError
from memfit.dryrun import libraries
from memfit.dryrun.calibration import (
    FOLDER_VARIABLE,
    Calibration,
    WorkspaceReading,
    all_calibrations,
    find_calibration,
    forget,
    remember,
)
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.device_memory import imitated_device_memory, with_device_memory
from memfit.dryrun.environment import gpu_environment
from memfit.dryrun.result import DryRunResult, Interval, Range
from memfit.dryrun.uncertainty import Part
from memfit.reports.spread import device_memory_line

MIB = 1 << 20
GIB = 1 << 30
TORCH = "2.14.1+cu130"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "calibration"))
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    return tmp_path / "calibration"


def result(**more: Any) -> DryRunResult:
    context = 470 * MIB
    reserved = more.get("peak_reserved_bytes", 10 * GIB)
    figures: dict[str, Any] = {
        "gpu": "rtx4090-24gb",
        "torch": TORCH,
        "peak_requested_bytes": 9 * GIB,
        "peak_allocated_bytes": 9 * GIB + 5 * MIB,
        "peak_reserved_bytes": reserved,
        "context_bytes": context,
        "device_total_bytes": context + reserved,
        "nvml_total_bytes": 24 * GIB,
        "runtime_total_bytes": 23 * GIB,
        "event_count": 1,
        "wall_seconds": 1.0,
    }
    return DryRunResult(**{**figures, **more})


def parts(value: DryRunResult) -> dict[str, Part]:
    assert value.device_memory is not None
    return {part.name: part for part in value.device_memory.parts}


def calibration(*shares: float, torch: str = TORCH) -> Calibration:
    readings = tuple(
        WorkspaceReading(
            configuration=f"{number}", family="forward", measured_bytes=int(share * GIB), rule_bytes=GIB
        )
        for number, share in enumerate(shares)
    )
    return Calibration(
        gpu="rtx4090-24gb",
        name="NVIDIA GeForce RTX 4090",
        driver="595.1",
        cuda="13.0",
        torch=torch,
        cudnn="92400",
        bare_context_bytes=430 * MIB,
        loaded_context_bytes=465 * MIB,
        workspaces=readings,
    )


def test_what_pytorch_alone_decides_is_exact() -> None:
    memory = with_confidence(result()).device_memory
    assert memory is not None
    assert [part.name for part in memory.parts if not part.exact] == ["context"]
    assert memory.expected_bytes == result().device_total_bytes
    assert (memory.low_bytes, memory.high_bytes) == (10 * GIB + 426 * MIB, 10 * GIB + 560 * MIB)
    line = device_memory_line(memory)
    assert (
        line.startswith("Device memory 10.46 GiB expected (10.42 GiB to 10.55 GiB: context")
        and "exact" in line
    )


def test_each_part_is_in_the_sum() -> None:
    ends = Range(low_bytes=9 * GIB, high_bytes=12 * GIB)
    found = with_device_memory(
        result(
            interval=Interval(requested=ends, allocated=ends, reserved=ends),
            estimates={
                libraries.BESIDE_THE_PEAKS: 256 * MIB,
                "cuDNN RNN workspace and reserve space": 100 * MIB,
                "NCCL communicator": 600_000_000,
            },
            device_total_bytes=470 * MIB + 10 * GIB + 600_000_000,
        )
    )
    memory, by_name = found.device_memory, parts(found)
    assert memory is not None
    for end in ("low_bytes", "expected_bytes", "high_bytes"):
        assert getattr(memory, end) == sum(getattr(part, end) for part in memory.parts)
    assert (by_name["unknown values"].low_bytes, by_name["unknown values"].high_bytes) == (-GIB, 2 * GIB)
    assert by_name["NCCL"].expected_bytes == 600_000_000 and not by_name["NCCL"].exact
    assert by_name["scratch of libraries"].high_bytes == 100 * MIB
    assert by_name["cuDNN workspaces"].expected_bytes == 128 * MIB
    assert by_name["cuDNN workspaces"].high_bytes == 4 * 256 * MIB


def test_workspaces_take_no_more_from_below_than_the_cache_has() -> None:
    tight = result(
        peak_allocated_bytes=10 * GIB - 7,
        estimates={libraries.BESIDE_THE_PEAKS: MIB},
        peak_reserved_bytes=10 * GIB,
    )
    assert parts(with_device_memory(tight))["cuDNN workspaces"].low_bytes == -7


def test_eager_loading_of_kernels_takes_more_context() -> None:
    lazy = parts(with_device_memory(result(), environment={}))["context"]
    eager = parts(with_device_memory(result(), environment={"CUDA_MODULE_LOADING": "EAGER"}))["context"]
    assert eager.expected_bytes - lazy.expected_bytes == 666_632_192 - 287_047_680


def test_a_calibration_is_remembered_narrows_and_is_forgotten(own_folder: Path) -> None:
    convolution = result(estimates={libraries.BESIDE_THE_PEAKS: GIB})
    wide = with_device_memory(convolution).device_memory
    remember(calibration(0.0, 0.25, 0.5))
    found = with_device_memory(convolution)
    narrow = found.device_memory
    assert wide is not None and narrow is not None
    assert narrow.high_bytes - narrow.low_bytes < wide.high_bytes - wide.low_bytes
    assert parts(found)["context"].expected_bytes == 465 * MIB
    assert parts(found)["cuDNN workspaces"].expected_bytes == GIB // 8
    assert "driver 595.1" in narrow.calibration and "driver 595.1" in device_memory_line(narrow)
    assert with_device_memory(replace(convolution, torch="2.13.0")).device_memory != narrow
    assert with_device_memory(replace(convolution, gpu="h100-80gb")).device_memory != narrow
    assert [one for _, one in all_calibrations()] == [calibration(0.0, 0.25, 0.5)]
    assert forget("rtx4090-24gb") == 1 and forget() == 0
    assert with_device_memory(convolution).device_memory == wide


def test_measured_convolutions_without_workspace_leave_the_peak_exact() -> None:
    none = with_device_memory(
        result(estimates={libraries.BESIDE_THE_PEAKS: GIB}), calibration=calibration(0.0, 0.0)
    )
    assert parts(none)["cuDNN workspaces"] == replace_part(parts(none)["cuDNN workspaces"], 0)


def replace_part(part: Part, size: int) -> Part:
    return Part(part.name, size, size, size, part.why)


def test_the_portable_engine_widens_where_it_saw_convolutions() -> None:
    gpu = find_gpu("rtx4090-24gb")
    sizes = {"torch": TORCH, "allocated_bytes": 9 * GIB, "reserved_bytes": 10 * GIB}
    plain = imitated_device_memory(gpu, **sizes)
    seen = imitated_device_memory(gpu, **sizes, not_modelled=("cuDNN's workspaces count as 0 bytes",))
    assert plain.expected_bytes == seen.expected_bytes == 10 * GIB + gpu.context_bytes
    assert seen.high_bytes - plain.high_bytes == 2 * GIB and seen.low_bytes < plain.low_bytes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 9}', '{"schema_version": 1, "gpu": 1}'])
def test_a_broken_file_is_passed_over_by_predictions_and_told_when_asked_for(
    own_folder: Path, text: str
) -> None:
    path = remember(calibration(0.5))
    path.write_text(text, encoding="utf-8")
    assert find_calibration("rtx4090-24gb", TORCH) is None
    with pytest.raises(InputError, match="calibrat"):
        all_calibrations()


@pytest.mark.parametrize(
    ("reserved", "rule", "level"),
    [
        (60 * MIB, 30 * MIB, "medium"),  # half of the peak, and a twentieth of the device's memory
        (60 * MIB, 300 * MIB, "low"),
        (10 * GIB, GIB, "medium"),
        (1 * GIB, GIB, "low"),
    ],
)
def test_workspaces_beside_the_peaks_are_judged_by_the_device_memory(
    reserved: int, rule: int, level: str
) -> None:
    peaks = {"peak_requested_bytes": reserved, "peak_allocated_bytes": reserved}
    found = result(peak_reserved_bytes=reserved, estimates={libraries.BESIDE_THE_PEAKS: rule}, **peaks)
    judged = with_confidence(found)
    assert judged.confidence == level
    assert judged.confidence_reasons[0].startswith("sizes by a rule")


def test_json_goes_there_and_back_and_old_results_are_read() -> None:
    found = with_confidence(result(estimates={libraries.BESIDE_THE_PEAKS: GIB}))
    text = json.dumps(found.to_json())
    assert DryRunResult.from_json(json.loads(text)) == found
    old = json.loads(text)
    del old["device_memory"]
    assert DryRunResult.from_json(old).device_memory is None


def test_every_constant_has_an_order_and_a_source() -> None:
    for one in libraries.ALL:
        assert one.low <= one.expected <= one.high and len(one.source) > 20, one
    page = Path(__file__).parents[2] / "docs" / "library-memory.md"
    shown = " ".join(page.read_text(encoding="utf-8").split())
    assert [one.what for one in libraries.ALL if one.what not in shown] == []


RULE = """
import torch
from memfit.dryrun.devices import estimates

def conv(channels, kernels, side, window, dtype=torch.float32, stride=1, layout=torch.contiguous_format):
    x = torch.empty(32, channels, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.empty(kernels, channels, window, window, device="cuda", dtype=dtype).to(memory_format=layout)
    torch.nn.functional.conv2d(x, w, padding=window // 2, stride=stride)
    print(estimates().get("convolution workspace beside the peaks", 0))

"""
TURING, AMPERE = {"MEMFIT_GPU_CC": "75"}, {"MEMFIT_GPU_CC": "86"}
CONVOLUTIONS: dict[str, tuple[dict[str, str], int]] = {
    # as Kineto's public trace of ResNet-50 (V100, batch 32, fp32) has them, less 2,560 B in the second
    "conv(256, 256, 14, 3)": (TURING, 47_185_920),
    "conv(256, 256, 28, 3, stride=2)": (TURING, 36_833_792 - 2_560),
    "conv(64, 256, 56, 1)": (TURING, 0),
    # tensor cores: the three operands once more
    "conv(64, 128, 56, 1, torch.float16)": (TURING, 2 * (32 * 56 * 56 * (64 + 128) + 64 * 128)),
    "conv(64, 128, 56, 3)": (AMPERE, 4 * (32 * 56 * 56 * (64 + 128) + 64 * 128 * 9)),
    "conv(64, 128, 56, 3, layout=torch.channels_last)": (AMPERE, 0),
}


BLAS = """
import os, torch
os.environ.update({env!r})
y = torch.nn.Linear(256, 256).cuda().half()(torch.randn(64, 256, device="cuda").half())
blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
print(max([b["requested_size"] for b in blocks if b["requested_size"] >= 1 << 20], default=0))
"""
WORKSPACES: tuple[tuple[dict[str, str], int], ...] = (
    ({}, 8_519_680),
    ({"MEMFIT_GPU_CC": "90"}, 33_554_432),
    ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 33_554_432),
    ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 << 10),
    ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 1 << 20),
    ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "4096"}, 4 << 20),
)


MEASURING = """
import json
from memfit.dryrun import calibration_steps as steps, calibration
steps._SHAPES = steps._SHAPES[:1]
readings = {"schema_version": 1, "gpu": "made-up", **steps.measure()}
print(json.dumps(calibration.Calibration.from_json(readings).to_json()))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Everything that this file runs on the made-up GPU, each in a fork of one process."""
    cases = {call: Case(code=RULE + call, env=gpu) for call, (gpu, _) in CONVOLUTIONS.items()}
    cases |= {str(env): Case(code=BLAS.format(env=env), env=env) for env, _ in WORKSPACES}
    cases["measuring"] = Case(code=MEASURING, env={"MEMFIT_CUDNN_WORKSPACE_BYTES": "5242880"})
    return run_cases(cases, {**gpu_environment(find_gpu("rtx3060-12gb")), "OMP_NUM_THREADS": "1"})


@pytest.mark.dryrun
def test_the_rule_of_convolutions(outcomes: dict[str, Outcome]) -> None:
    told = {call: outcomes[call].output.split()[-1:] for call in CONVOLUTIONS}
    assert told == {call: [str(size)] for call, (_, size) in CONVOLUTIONS.items()}


@pytest.mark.dryrun
def test_workspaces_of_cublas_are_what_pytorch_makes_of_the_variables(outcomes: dict[str, Outcome]) -> None:
    told = {str(env): outcomes[str(env)].output.split()[-1] for env, _ in WORKSPACES}
    assert told == {str(env): str(size if size >= 1 << 20 else 0) for env, size in WORKSPACES}


def test_without_a_gpu_calibrate_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert main(["calibrate"]) == 6
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no" in said.err


def test_calibrate_shows_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    remember(calibration(0.5))
    assert main(["calibrate", "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [Calibration.from_json(one) for one in shown["calibrations"]] == [calibration(0.5)]
    assert main(["calibrate", "--show"]) == 0
    assert "0.50 of the rule's size" in capsys.readouterr().out
    assert main(["calibrate", "--forget", "--gpu", "4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forgotten"] == 1
    assert main(["calibrate", "--show", "--forget"]) == 2


@pytest.mark.dryrun
def test_what_calibrate_measures_with_runs_on_the_made_up_gpu(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["measuring"].code == 0, outcomes["measuring"].output
    found = Calibration.from_json(json.loads(outcomes["measuring"].output.splitlines()[-1]))
    assert found.name == "NVIDIA GeForce RTX 3060" and found.bare_context_bytes == 320 * MIB
    assert {one.measured_bytes for one in found.workspaces} == {5_242_880} and len(found.workspaces) == 12
    assert all(step.peak_reserved_bytes > step.peak_allocated_bytes > 0 for step in found.steps)


@pytest.mark.gpu
def test_a_gpu_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--json"]) == 0
    found = Calibration.from_json(json.loads(capsys.readouterr().out)["calibrations"][0])
    assert 100 * MIB < found.bare_context_bytes <= found.loaded_context_bytes < 2 * GIB
