"""FLOPs against PyTorch's counter, bytes against what operators must touch, seconds against the roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import cnn, gpt, mlp
from torch.utils.flop_counter import FlopCounterMode

from memfit.capture import capture_step
from memfit.capture.cost_mode import CostMode
from memfit.capture.costs import LAUNCH_SECONDS, op_class, op_seconds, peak_flops, step_seconds
from memfit.capture.graph import Op
from memfit.capture.operators import OpCall
from memfit.capture.step import build_step
from memfit.core.devices import find_gpu

A100 = find_gpu("a100-80gb")


def counted(workload):
    step = build_step(workload, device="cpu")
    with FlopCounterMode(display=False) as counter:
        step.run()
    return counter.get_total_flops()


def call(func, *args, **kwargs):
    return OpCall(func, args, kwargs, func(*args, **kwargs)).work()


@pytest.mark.parametrize("workload", [mlp, cnn])
def test_flops_equal_pytorchs_counter(workload):
    assert capture_step(workload()).flops == counted(workload())


def test_attention_on_the_cpu_is_counted_though_pytorch_has_no_formula():
    graph = capture_step(gpt())
    # Per block: two products of batch x heads x length x length x width forward, and five backward.
    square = 2 * 4 * 4 * 32 * 32 * 16
    assert graph.flops == counted(gpt()) + 2 * 7 * square


@pytest.mark.parametrize("workload", [mlp, cnn, gpt])
def test_the_live_sum_equals_the_graphs(workload):
    graph = capture_step(workload())
    step = build_step(workload(), device="cpu")
    step.run()
    costs = CostMode(A100, device="cpu")
    with costs:
        step.run(costs.on_phase)
    assert costs.flops == graph.flops
    assert costs.op_count == len(graph.ops)
    assert costs.seconds == pytest.approx(step_seconds(graph.ops, A100))
    assert set(costs.seconds_by_phase) == {op.phase for op in graph.ops}


def test_recomputation_is_summed_apart():
    step = build_step(gpt(recompute="non-reentrant"), device="cpu")
    costs = CostMode(A100, device="cpu")
    with costs:
        step.run(costs.on_phase)
    assert (
        costs.flops_by_phase["recompute"] == capture_step(gpt(recompute="non-reentrant")).recompute_flops > 0
    )


aten = torch.ops.aten
X = torch.ones(8, 16)
FLOAT = 4


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda: call(aten.add.Tensor, X, X), 3 * 128 * FLOAT),
        (lambda: call(aten.mul_.Tensor, X.clone(), X), 3 * 128 * FLOAT),
        (lambda: call(aten.zero_.default, X.clone()), 128 * FLOAT),
        (lambda: call(aten.copy_.default, X.clone(), X), 2 * 128 * FLOAT),
        (lambda: call(aten.zeros_like.default, X), 128 * FLOAT),
        (lambda: call(aten.empty_like.default, X), 0),
        (lambda: call(aten.view.default, X, [128]), 0),
        (lambda: call(aten.t.default, X), 0),
        (lambda: call(aten.sum.default, X), 128 * FLOAT + FLOAT),
        # An expanded operand is read from the memory that it has.
        (lambda: call(aten.add.Tensor, torch.ones(1, 16).expand(8, 16), X), (16 + 2 * 128) * FLOAT),
        (lambda: call(aten.embedding.default, torch.ones(1000, 16), torch.arange(4)), 4 * 8 + 2 * 64 * FLOAT),
        (lambda: call(aten.mm.default, X, X.T), 2 * 128 * FLOAT + 64 * FLOAT),
    ],
)
def test_bytes_moved(work, moved):
    assert work().bytes_moved == moved


def test_optimizers_on_lists_count_every_tensor():
    parameters = [torch.zeros(100), torch.zeros(50)]
    graph_bytes = call(aten._foreach_add_.List, parameters, [torch.ones(100), torch.ones(50)]).bytes_moved
    assert graph_bytes == 3 * 150 * FLOAT


def test_causal_attention_does_half_of_what_is_counted():
    q = torch.ones(1, 2, 32, 16)
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    whole, causal = call(attend, q, q, q, 0.0, False), call(attend, q, q, q, 0.0, True)
    assert whole.flops == causal.flops
    assert (whole.work, causal.work) == (1.0, 0.5)


def test_convolutions_compute_in_tf32_by_default_and_products_do_not():
    image, kernel = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    convolved = call(aten.convolution.default, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert convolved.dtype == "tf32"
    assert call(aten.mm.default, X, X.T).dtype == "float32"
    assert call(aten.mm.default, X.bfloat16(), X.T.bfloat16()).dtype == "bfloat16"


def test_seconds_follow_the_roofline():
    large = Op(index=0, name="aten.mm.default", flops=10**13, bytes_moved=10**9, dtype="bfloat16")
    assert op_seconds(large, A100) == pytest.approx(10**13 / (A100.peak_flops["bf16"] * 0.7))
    wide = Op(index=0, name="aten.add.Tensor", bytes_moved=10**10)
    assert op_seconds(wide, A100) == pytest.approx(10**10 / (A100.bandwidth_bytes_per_second * 0.8))
    assert op_seconds(replace(wide, bytes_moved=10), A100) == LAUNCH_SECONDS
    assert op_seconds(replace(wide, bytes_moved=0), A100) == 0.0
    assert step_seconds([large, wide], A100) == op_seconds(large, A100) + op_seconds(wide, A100)


def test_a_type_that_the_gpu_lacks_computes_in_the_next_wider_one():
    old = next(gpu for gpu in map(find_gpu, ("t4", "v100-16gb", "rtx2080ti")) if "bf16" not in gpu.peak_flops)
    assert peak_flops("bfloat16", old) == old.peak_flops["fp16"]
    assert peak_flops("tf32", old) == old.peak_flops["fp32"]


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("aten.mm.default", "gemm"),
        ("aten.addmm.default", "gemm"),
        ("aten.bmm.default", "gemm"),
        ("aten._scaled_dot_product_efficient_attention_backward.default", "attention"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten.native_layer_norm.default", "normalization"),
        ("aten.cudnn_batch_norm_backward.default", "normalization"),
        ("aten._fused_adamw_.default", "optimizer"),
        ("aten._foreach_addcdiv_.ScalarList", "optimizer"),
        ("aten.embedding_dense_backward.default", "gather"),
        ("aten.nll_loss_forward.default", "gather"),
        ("aten._log_softmax.default", "reduction"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.clone.default", "copy"),
        ("aten.cat.default", "copy"),
        ("aten.gelu_backward.default", "elementwise"),
        ("aten.add.Tensor", "elementwise"),
        ("aten.native_dropout.default", "elementwise"),
        ("aten.mul.Tensor", "elementwise"),
    ],
)
def test_classes_of_operators(name, cls):
    assert op_class(name).name == cls


def test_foreach_moves_more_than_fused():
    fused = capture_step(mlp(optimizer=lambda p: torch.optim.AdamW(p, fused=True)))
    foreach = capture_step(mlp(optimizer=lambda p: torch.optim.AdamW(p, foreach=True)))
    moved = [sum(op.bytes_moved for op in g.ops if op.phase == "optimizer") for g in (fused, foreach)]
    assert moved[1] > 2 * moved[0]
    parameters = sum(s.size_bytes for s in fused.storages if s.category == "parameter")
    # Parameter, gradient and two moments are read; all four are written (the gradient says the schema).
    assert moved[0] == pytest.approx(8 * parameters, rel=0.05)
