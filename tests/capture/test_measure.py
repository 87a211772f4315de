"""Measuring on the made-up GPU: equal to a loop without memfit, to PyTorch's history, and to the graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from models import gpt

from memfit.capture import capture_step
from memfit.capture.graph import StepGraph
from memfit.core.devices import find_gpu
from memfit.core.errors import ToolFailure, WorkloadFailed
from memfit.core.timeline import Timeline
from memfit.core.trace import Trace
from memfit.dryrun.repeats import with_other_answers
from memfit.dryrun.result import DryRunResult, OutOfMemory
from memfit.dryrun.worker import Worker

pytestmark = pytest.mark.dryrun

A100 = find_gpu("a100-80gb")
GIB = 2**30
# What PyTorch takes for cuBLAS before Hopper, once for the forward thread and once for autograd's.
CUBLAS_WORKSPACES = 2 * 8_519_680

SMALL = "hf:gpt2,n_layer=3,batch=2,seq=256"
LLAMA = (
    "hf:llama,hidden_size=2048,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,"
    "intermediate_size=8192,vocab_size=128256,batch=2,seq=2048,dtype=bf16"
)
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "llama", "t5"))


@pytest.fixture(scope="module")
def worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with Worker(A100, preload=("torch", "torchvision", *MODELS)) as worker:
            yield worker


def measure(worker, spec, gpu=A100, **options):
    reference = {"spec": spec, "folder": "/"}
    return worker.call(
        "memfit.capture.measure:measure", gpu=gpu, workload=reference, gpu_key=gpu.key, **options
    )


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        f"{SMALL},dtype=bf16-autocast",
        f"{SMALL},dtype=fp16-autocast",
        "tv:resnet18,batch=8",
        "hf:t5,batch=2,seq=64",
    ],
)
def test_peaks_are_those_of_a_plain_loop(worker, spec):
    plain = worker.call("targets:plain_loop", reference={"spec": spec, "folder": "/"})
    found = measure(worker, spec, costs=False)
    if "fp16" in spec:  # the loss scaler has scalars of its own
        assert found["peak_requested_bytes"] - plain["peak_requested_bytes"] in range(4096)
        return
    for name, block in (("requested", 4), ("allocated", 512), ("reserved", 0)):
        # A loop's `loss` is still there in its optimizer.step(), where this model's peak may be.
        assert plain[f"peak_{name}_bytes"] - found[f"peak_{name}_bytes"] in (0, block)


@pytest.mark.parametrize(
    ("spec", "allocated_gib"),
    [
        ("hf:gpt2,batch=8,seq=1024", 14.08),
        ("hf:gpt2,batch=8,seq=1024,dtype=bf16-autocast", 12.35),
        ("hf:bert,batch=16,seq=512", 8.81),
        (LLAMA, 20.96),
        ("tv:resnet50,batch=64", 5.51),
        ("hf:t5,batch=16,seq=512", 8.19),
    ],
)
def test_peaks_of_known_workloads(worker, spec, allocated_gib):
    """Figures of an earlier, independent script on the same kind of made-up GPU."""
    result = measure(worker, spec, costs=False)
    assert result["oom"] is None and result["steps_done"] == 3
    assert round(result["peak_allocated_bytes"] / GIB, 2) == allocated_gib


@pytest.mark.parametrize(
    "spec", [SMALL, f"{SMALL},dtype=bf16-autocast", "hf:bert,num_hidden_layers=2,batch=2"]
)
def test_the_graph_is_the_allocators_account_but_for_cublas(worker, spec):
    result = measure(worker, spec, categories=True)
    graph = StepGraph.from_json(
        worker.call("memfit.capture.measure:capture_reference", workload={"spec": spec, "folder": "/"})
    )
    assert graph.peak_bytes + CUBLAS_WORKSPACES == result["peak_requested_bytes"]
    assert graph.resting_bytes + CUBLAS_WORKSPACES == result["resting_bytes"]
    assert result["peak_by_category"]["workspace"] == CUBLAS_WORKSPACES
    assert sum(result["peak_by_category"].values()) == result["peak_requested_bytes"]
    assert result["flops"] == graph.flops


def test_every_storage_of_the_graph_is_in_pytorchs_history(worker):
    """The history has more: what operators take and give back inside, such as attention's backward."""
    reference = {"spec": SMALL, "folder": "/"}
    data = worker.call("memfit.capture.measure:capture_reference", workload=reference)
    graph = StepGraph.from_json(data)
    made = Counter(-(-s.size_bytes // 512) * 512 for s in graph.storages if s.born >= 0 and s.size_bytes)
    history = Counter(
        -(-size // 512) * 512 for size in worker.call("targets:allocations_of_step", reference=reference)
    )
    assert made <= history
    assert (history - made).total() < 0.2 * history.total()


def test_phases_trace_and_account(worker, tmp_path):
    path = tmp_path / "step.memfit-trace"
    result = measure(worker, SMALL, trace_path=str(path))
    assert set(result["phase_peaks"]) == {"forward", "backward", "optimizer", "other"}
    assert max(result["phase_peaks"].values()) == result["peak_requested_bytes"] == result["step_peaks"][-1]
    assert Timeline.of(Trace.load(path)).peak_bytes + CUBLAS_WORKSPACES == result["peak_requested_bytes"]
    assert result["device_total_bytes"] == A100.context_bytes + result["peak_reserved_bytes"]
    assert result["step_seconds"] == pytest.approx(sum(result["seconds_by_phase"].values()))
    assert (result["value_reads"], result["not_modelled"], result["estimates"]) == ([], [], {})


def test_a_step_steered_by_unknown_values_has_an_interval(worker, tmp_path):
    file = tmp_path / "sparse.py"
    file.write_text(
        "import torch\nfrom memfit import Workload\n\n"
        "def loss(model, batch):\n"
        "    out = model(batch)\n"
        "    return out[out > 0].square().sum()\n\n"
        "workload = lambda: Workload(name='sparse', model=lambda: torch.nn.Linear(64, 4096),\n"
        "    batch=lambda: torch.randn(1024, 64), loss=loss)\n"
    )

    def run(**options):
        return DryRunResult.from_measure(measure(worker, f"{file}:workload", steps=2, costs=False, **options))

    first = run()
    (read,) = first.value_reads
    assert (read.file, read.line, read.kind, read.steers) == (str(file), 6, "size", "yes")
    result = with_other_answers(first, lambda answers: run(answers=dict(answers)), most=None)
    assert result.interval is not None and result.interval.repeats == 2
    requested = result.interval.requested
    assert requested.low_bytes < first.peak_requested_bytes < requested.high_bytes
    chosen = 1024 * 4096 * 4  # all of the output, twice: as it is chosen, and squared
    assert requested.high_bytes - requested.low_bytes > 2 * chosen
    quiet = DryRunResult.from_measure(measure(worker, SMALL))
    assert with_other_answers(quiet, run, most=None).interval.repeats == 0


def test_micro_batches_and_an_emptied_cache_need_less(worker):
    spec = "hf:gpt2,n_layer=3,batch=8,seq=512"
    whole, parts = measure(worker, spec), measure(worker, spec, micro_batches=2)
    assert parts["peak_requested_bytes"] < whole["peak_requested_bytes"]
    assert parts["flops"] == whole["flops"]
    emptied = measure(worker, spec, empty_cache=True)
    assert emptied["peak_requested_bytes"] == whole["peak_requested_bytes"]
    assert emptied["peak_reserved_bytes"] >= emptied["peak_allocated_bytes"]


def test_out_of_memory_in_the_step_is_a_value(worker):
    small = find_gpu("rtx3060-12gb")
    result = measure(worker, "hf:gpt2", gpu=small)
    oom = OutOfMemory(**result["oom"])
    # PyTorch's own figure: the segment that it asked the device for, whole multiples of 2 MiB.
    assert oom.phase == "forward" and oom.asked_bytes - 8 * 1024 * 50257 * 4 in range(2**21)
    assert result["steps_done"] == 0 and 0 < oom.free_bytes < oom.asked_bytes
    assert result["peak_reserved_bytes"] <= small.runtime_total_bytes - small.context_bytes


def test_out_of_memory_while_the_model_is_built(worker):
    tiny = dataclasses.replace(find_gpu("rtx3060-12gb"), runtime_total_bytes=700 * 2**20)
    result = measure(worker, "hf:gpt2", gpu=tiny)
    assert result["oom"]["phase"] == "init"
    assert result["peak_requested_bytes"] == 0


def test_captured_on_a_gpu_the_operators_are_cudas():
    graph = capture_step(gpt(precision="bf16-autocast", dropout=0.0), gpu="a100-80gb")
    names = {op.name for op in graph.ops}
    assert "aten._scaled_dot_product_flash_attention.default" in names
    assert "aten._foreach_addcdiv_.ScalarList" in names
    assert not any("for_cpu" in name for name in names)
    assert graph.device == "cuda"
    backward = [op.module for op in graph.ops if op.phase == "backward" and "attention" in op.name]
    assert backward == ["blocks.1", "blocks.0"]


@pytest.mark.parametrize("recompute", ["non-reentrant", "reentrant"])
def test_on_a_gpu_recomputation_runs_in_autograds_thread_and_is_attributed_all_the_same(recompute):
    graph = capture_step(gpt(recompute=recompute), gpu="a100-80gb")
    cpu = capture_step(gpt(recompute=recompute))
    for phase in ("recompute", "backward"):
        for module in ("blocks.0.up", "blocks.1.ln1", "blocks.1.qkv"):
            here, there = (
                {
                    op.name
                    for op in g.ops
                    if (op.phase, op.module) == (phase, module) and "layer_norm" in op.name
                }
                | {str(op.flops) for op in g.ops if (op.phase, op.module) == (phase, module) and op.flops}
                for g in (graph, cpu)
            )
            assert here == there


def test_capturing_what_does_not_fit_says_so():
    tiny = dataclasses.replace(A100, runtime_total_bytes=A100.context_bytes + 8 * 2**20)
    with pytest.raises(ToolFailure, match="does not fit NVIDIA A100"):
        capture_step(gpt(), gpu=tiny)


def test_a_workload_that_raises_names_its_line(worker, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from memfit.core.workload import Workload\n"
        "def lose(model, batch):\n"
        "    return model(batch).sum() + torch.ones(3, device=batch.device)[7]\n"
        "def make():\n"
        "    return Workload(name='x', model=lambda: torch.nn.Linear(2, 2),\n"
        "                    batch=lambda: torch.ones(2, 2), loss=lose)\n"
    )
    with pytest.raises(WorkloadFailed, match=r"IndexError: .*mine.py:4 in lose"):
        measure(worker, f"{file}:make")
