"""The roofline against its formula, and measured times against what torch.profiler itself adds up."""

from __future__ import annotations

import doctest
import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from memfit import InputError, PerformanceAnalyzer, UsageError
from memfit.analysis import performance as performance_module
from memfit.analysis.subject import Subject
from memfit.capture.graph import Op, StepGraph
from memfit.core.devices import find_gpu
from memfit.formats.operator_times import read_operator_times, times_of

GPU = find_gpu("a100-80gb")


def product(index=0, size=4096, **changes):
    values = {
        "name": "aten.mm.default",
        "flops": 2 * size**3,
        "bytes_moved": 12 * size**2,
        "dtype": "bfloat16",
    }
    return Op(index=index, **{**values, **changes})


def addition(index, count=1 << 28, **changes):
    return Op(index=index, name="aten.add.Tensor", bytes_moved=12 * count, **changes)


def step():
    return StepGraph(
        ops=(
            product(0, module="h.0"),
            product(1, module="h.1"),
            addition(2, module="h.0"),
            Op(index=3, name="aten.add.Tensor", bytes_moved=64),
            Op(index=4, name="aten.view.default", is_view=True),
            product(5, phase="recompute"),
            addition(6, phase="optimizer"),
        ),
        storages=(),
        name="made",
    )


def test_each_operator_under_the_roofline():
    analysis = PerformanceAnalyzer(step(), gpu="a100-80gb").analyze()
    by_name = {cost.name: cost for cost in analysis.operators}
    compute = 2 * 4096**3 / (GPU.peak_flops["bf16"] * 0.7)
    memory = 12 * (1 << 28) / (GPU.bandwidth_bytes_per_second * 0.8)
    assert by_name["aten::mm"].bound == "compute" and by_name["aten::add"].bound == "bandwidth"
    assert by_name["aten::mm"].seconds == pytest.approx(3 * compute)
    assert analysis.seconds_by_bound == pytest.approx(
        {"compute": 3 * compute, "bandwidth": 2 * memory, "overhead": 4e-6}
    )
    assert analysis.seconds == pytest.approx(3 * compute + 2 * memory + 4e-6)
    assert analysis.op_count == 6 and analysis.flops == 3 * 2 * 4096**3  # the view costs nothing
    model_seconds = 2 * 2 * 4096**3 / GPU.peak_flops["bf16"]  # what is recomputed is not the model's
    assert analysis.mfu == pytest.approx(model_seconds / analysis.seconds)
    assert analysis.ridge == pytest.approx(GPU.peak_flops["bf16"] / GPU.bandwidth_bytes_per_second)
    assert {cost.name: cost.calls for cost in analysis.modules} == {"h.*": 3, "": 3}
    assert {cost.name for cost in analysis.phases} == {"forward", "recompute", "optimizer"}
    assert analysis.bound == "bandwidth"


def test_the_same_step_is_bound_otherwise_on_another_gpu():
    ops = tuple(product(i, size=512) for i in range(4))
    graph = StepGraph(ops=ops, storages=())
    bounds = {
        gpu: PerformanceAnalyzer(graph, gpu=gpu).analyze().bound for gpu in ("rtx3060-12gb", "h100-80gb")
    }
    assert bounds == {"rtx3060-12gb": "compute", "h100-80gb": "overhead"}


def test_text_json_and_picture():
    analysis = PerformanceAnalyzer(step(), gpu="a100-80gb").analyze()
    assert "Model FLOPs utilisation" in str(analysis) and "h.*" in str(analysis)
    assert json.loads(json.dumps(analysis.to_json()))["bound"] == "bandwidth"
    labels = [text.get_text() for text in analysis.figure().axes[0].get_legend().get_texts()]
    assert labels[0].endswith("nominal") and "compute-bound" in labels


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A training loop with a DataLoader under torch.profiler on the CPU, and the profiler's own sums."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(4 * 64, 256), batch_size=64)
    path = tmp_path_factory.mktemp("kineto") / "trace.json"
    settings = {
        "activities": [ProfilerActivity.CPU],
        "schedule": schedule(wait=0, warmup=1, active=3, repeat=1),
        "on_trace_ready": lambda recorder: recorder.export_chrome_trace(str(path)),
    }
    with profile(**settings, acc_events=True) as prof:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return path, {row.key: (row.count, row.self_cpu_time_total * 1e-6) for row in prof.key_averages()}


def test_measured_times_are_those_of_the_profiler(recorded):
    path, truth = recorded
    times = read_operator_times(path)
    assert times.steps == 3 and not times.on_device
    for name in ("aten::addmm", "aten::mm", "aten::relu", "aten::mul_", "aten::add_"):
        if name in truth:
            calls, seconds = truth[name]
            assert times.by_name[name].calls == calls
            assert times.by_name[name].host_seconds == pytest.approx(seconds, rel=0.02, abs=2e-5)
    loader = next(seconds for key, (_, seconds) in truth.items() if key.startswith("enumerate(DataLoader)"))
    assert times.loader_seconds >= loader > 0
    assert 0 < times.optimizer_seconds < times.wall_seconds


def test_a_compressed_trace_reads_the_same(recorded, tmp_path):
    path, _ = recorded
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_operator_times(packed) == read_operator_times(path)


def span(name, category, begin, took, **arguments):
    return {
        "ph": "X", "name": name, "cat": category, "ts": begin, "dur": took, "pid": 1,
        "tid": arguments.pop("tid", 1), "args": arguments,
    }  # fmt: skip


def gpu_events(loader=400):
    """Two steps of 1 ms: a product of 300 µs, a collective of 100 µs, a copy of 50 µs in each."""
    events = []
    for number in range(2):
        at = 1000.0 * number
        events += [
            span(f"ProfilerStep#{number}", "user_annotation", at, 1000),
            span(
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", at, loader
            ),
            span("aten::mm", "cpu_op", at + 400, 20, **{"External id": 2 * number + 1}),
            span("c10d::allreduce_", "cpu_op", at + 430, 10, **{"External id": 2 * number + 2}),
            span("sm80_gemm", "kernel", at + 410, 300, tid=7, **{"External id": 2 * number + 1}),
            span(
                "ncclDevKernel_AllReduce", "kernel", at + 710, 100, tid=8, **{"External id": 2 * number + 2}
            ),
            span("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", at + 400, 50, tid=7),
        ]
    return events


def test_kernels_are_put_down_to_their_operator():
    times = times_of(gpu_events(), "made")
    assert times.by_name["aten::mm"].device_seconds == pytest.approx(600e-6)
    assert times.step_seconds == pytest.approx(1e-3) and times.kernel_count == 6
    assert times.communication_seconds == pytest.approx(200e-6)
    assert times.copy_seconds == pytest.approx(100e-6)
    assert times.device_busy_seconds == pytest.approx(2 * 410e-6)  # the copy overlaps the product
    assert times.loader_seconds == pytest.approx(800e-6)


def test_measured_against_possible():
    times = times_of(gpu_events(loader=10), "made")
    analysis = PerformanceAnalyzer(step(), gpu="a100-80gb", measured=times).analyze()
    cost = next(cost for cost in analysis.operators if cost.name == "aten::mm")
    assert cost.measured_seconds == pytest.approx(300e-6)
    assert cost.achieved == pytest.approx(3 * 2 * 4096**3 / GPU.peak_flops["bf16"] / 300e-6)
    assert analysis.mfu == pytest.approx(2 * 2 * 4096**3 / GPU.peak_flops["bf16"] / 1e-3)
    assert "of possible" in str(analysis) and analysis.bound != "input"
    waiting = PerformanceAnalyzer(
        step(), gpu="a100-80gb", measured=times_of(gpu_events(990), "made")
    ).analyze()
    assert waiting.input_share == pytest.approx(0.99)


def test_what_cannot_be_analysed(tmp_path):
    with pytest.raises(UsageError, match="a roofline is that of a GPU"):
        PerformanceAnalyzer(step())
    broken = tmp_path / "t.json"
    for text, said in (
        ("{", "not the JSON"),
        ("{}", "no traceEvents"),
        ('{"traceEvents": []}', "no operators"),
    ):
        broken.write_text(text)
        with pytest.raises(InputError, match=said):
            read_operator_times(broken)


def test_the_docstring():
    assert doctest.testmod(performance_module).attempted


def test_a_compressed_profiler_trace_is_known_by_its_content(recorded, tmp_path):
    packed = tmp_path / "anything"
    packed.write_bytes(gzip.compress(recorded[0].read_bytes()))
    subject = Subject.of(packed)
    assert subject.times is not None and subject.recording is None  # it was recorded without memory
