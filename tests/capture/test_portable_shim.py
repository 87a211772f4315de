"""Meta tensors run CUDA's operators while the shim is entered, and PyTorch's own before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memfit.capture import cuda_autocast
from memfit.capture.cuda_autocast import autocast_operators
from memfit.capture.cuda_shim import Shim, cuda_operators
from memfit.core.errors import WorkloadFailed
from memfit.profiling.accumulation import accumulates

READS: list[tuple[str, str]] = []


@pytest.fixture
def shim() -> Iterator[Shim]:
    READS.clear()
    with cuda_operators((8, 0), note_read=lambda op, answer: READS.append((op, answer))) as shim:
        yield shim


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=grad)


def node(tensor: torch.Tensor) -> str:
    return type(tensor.grad_fn).__name__


class Names(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_every_autocast_operator_of_pytorch_is_known() -> None:
    named = (
        cuda_autocast.LOWER_PRECISION
        | cuda_autocast.PROMOTED
        | cuda_autocast.DTYPE_GIVEN
        | cuda_autocast.DTYPE_APPENDED.keys()
        | cuda_autocast.HALF
        | cuda_autocast.REFUSED
    )
    assert named <= set(autocast_operators())
    in_float32 = set(autocast_operators()) - named
    assert {"layer_norm", "nll_loss", "pow.Tensor_Scalar", "exp"} <= in_float32


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x, w: x @ w, torch.bfloat16),
        (lambda x, w: F.linear(x, w), torch.bfloat16),
        (lambda x, w: F.layer_norm(x.bfloat16(), (8,)), torch.float32),
        (lambda x, w: F.gelu(x.bfloat16()), torch.bfloat16),
        (lambda x, w: F.softmax(x.bfloat16(), -1), torch.float32),
        (lambda x, w: F.softmax(x.bfloat16(), -1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x, w: x.bfloat16().pow(2), torch.float32),
        (lambda x, w: x.bfloat16().sum(), torch.float32),
        (lambda x, w: x.bfloat16().norm(dim=1), torch.float32),
        (lambda x, w: torch.addcmul(x, w.bfloat16(), w.bfloat16()), torch.float32),
        (lambda x, w: x.double() + w.double(), torch.float64),
        (
            lambda x, w: F.cross_entropy(x.bfloat16(), torch.zeros(8, dtype=torch.long, device="meta")),
            torch.float32,
        ),
    ],
)
def test_autocast_casts_as_on_a_gpu(shim: Shim, run, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x, w = meta(8, 8), meta(8, 8)
    with torch.autocast("cuda", torch.bfloat16):
        assert run(x, w).dtype is dtype
    assert (x @ w).dtype is torch.float32


def test_autocast_keeps_cast_weights_until_the_outermost_context_ends(shim: Shim) -> None:
    layer, x = torch.nn.Linear(8, 8, device="meta"), meta(4, 8)
    with Names() as names, torch.autocast("cuda", torch.bfloat16):
        with torch.autocast("cuda", torch.bfloat16):
            layer(x)
        layer(x)
    assert names.seen.count("_to_copy") == 2 + 2  # weight and bias once, the input twice
    with Names() as names, torch.autocast("cuda", torch.bfloat16):
        layer(x)
    assert names.seen.count("_to_copy") == 3


def test_autocast_nests_and_answers_questions(shim: Shim) -> None:
    x = meta(8, 8)
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled("meta")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_runs_under_autocast_again(shim: Shim, reentrant: bool) -> None:
    layer, x = torch.nn.Linear(8, 8, device="meta"), meta(4, 8, grad=True)
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(x)
        seen.append(out.dtype)
        return out.sin()

    with torch.autocast("cuda", torch.bfloat16):
        out = checkpoint(block, x, use_reentrant=reentrant)
    out.sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_autocast_of_other_devices_is_pytorchs_own(shim: Shim) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16


def test_what_a_gpu_refuses_is_refused(shim: Shim) -> None:
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(WorkloadFailed, match="with_logits"):
        F.binary_cross_entropy(meta(4), meta(4))


def test_cudas_kernels_are_taken(shim: Shim) -> None:
    x = meta(2, 3, 8, 8, grad=True)
    assert node(torch.nn.BatchNorm2d(3, device="meta")(x)) == "CudnnBatchNormBackward0"
    assert node(F.dropout(x, 0.1)) == "NativeDropoutBackward0"
    assert F.dropout(x, 0.1, training=False) is x
    q = meta(2, 4, 16, 64, grad=True)
    assert "Efficient" in node(F.scaled_dot_product_attention(q, q, q))
    half = meta(2, 4, 16, 64, dtype=torch.float16, grad=True)
    assert "Flash" in node(F.scaled_dot_product_attention(half, half, half))
    normed = F.rms_norm(q, (64,), meta(64, grad=True))
    assert normed.shape == q.shape
    normed.sum().backward()
    assert q.grad is not None


def test_products_of_groups_are_cudas_also_in_float32(shim: Shim) -> None:
    rows = torch.empty(24, 32, device="meta", requires_grad=True)
    weights = torch.empty(4, 32, 18, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    out = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    assert (out.dtype, out.shape, out.stride()) == (
        torch.float32,
        (24, 18),
        (20, 1),
    )  # 16 bytes are 4 columns
    out.sum().backward()
    assert rows.grad is not None and rows.grad.shape == rows.shape
    assert weights.grad is not None and weights.grad.shape == weights.shape


def test_optimizers_take_their_gpu_forms(shim: Shim) -> None:
    for options, operator in (({}, "_foreach_lerp_"), ({"fused": True}, "_fused_adamw_")):
        layer = torch.nn.Linear(8, 8, device="meta")
        optimizer = torch.optim.AdamW(layer.parameters(), **options)
        layer(meta(2, 8)).sum().backward()
        with Names() as names:
            optimizer.step()
        assert operator in names.seen


def test_reads_of_values_get_an_answer_and_are_noted(shim: Shim) -> None:
    x = meta(4)
    assert (x > 1).all().item() is True
    assert x.sum().item() == 1.0
    assert torch.equal(x, x) and not torch.equal(x, meta(3))
    assert bool(x.any())
    assert [answer for _, answer in READS] == ["True", "1.0", "True", "False", "True"]


def test_steps_of_a_scaled_loss_are_taken(shim: Shim) -> None:
    layer = torch.nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("meta")
    scaler.scale(layer(meta(2, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks_run_as_one_kernel(shim: Shim, kind: str) -> None:
    net = getattr(torch.nn, kind)(8, 6, num_layers=2, batch_first=True, bidirectional=True, device="meta")
    x = meta(2, 5, 8, grad=True)
    out, _ = net(x)
    assert (out.shape, out.stride(), node(out)) == ((2, 5, 12), (12, 24, 1), "CudnnRnnBackward0")
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    weights = [parameter.grad for parameter in net.parameters()]
    assert len({weight.untyped_storage()._cdata for weight in weights}) == 1  # parts of one buffer
    with torch.autocast("cuda", torch.bfloat16):
        assert net(x)[0].dtype is torch.float16  # as cuDNN has it, whatever autocast's own type is
    assert not shim.met
    net(torch.nn.utils.rnn.PackedSequence(meta(8, 8), torch.tensor([2, 2, 2, 1, 1])))
    assert any("packed sequences" in what for what in shim.met)


def test_nothing_is_left_behind() -> None:
    with cuda_operators((8, 0)):
        pass
    x = meta(2, 4, 16, 64, grad=True)
    assert node(F.scaled_dot_product_attention(x, x, x)) == "UnsafeViewBackward0"
    assert node(F.dropout(x, 0.1)) == "MulBackward0"
    with pytest.raises(RuntimeError):
        x.sum().item()
    layer = torch.nn.Linear(2, 2, device="meta")
    layer.weight.grad = torch.empty_like(layer.weight)
    with Names() as names:
        torch.optim.AdamW(layer.parameters()).step()
    assert "_foreach_lerp_" not in names.seen


class Accumulations(TorchDispatchMode):
    """What `accumulates` says of each addition in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.said.append(accumulates(func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("modes_outside", [0, 1, 2])
def test_tells_the_engines_own_additions(modes_outside: int) -> None:
    x = meta(4, 4, grad=True)
    with Accumulations() as additions:
        outer = [Names() for _ in range(modes_outside)]
        for mode in outer:
            mode.__enter__()
        y = x * 2
        (y.sin().sum() + y.cos().sum()).backward()  # two gradients that nobody else holds
        y = x * 2
        (y.sin() + y).sum().backward()  # one is also the gradient of the sum's other operand
        for mode in reversed(outer):
            mode.__exit__(None, None, None)
    assert additions.said == [True, False]
