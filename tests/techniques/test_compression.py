"""One engine for data, saved activations, gradients and checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.capture import capture_step
from memfit.core.errors import InputError, UsageError
from memfit.core.workload import Workload
from memfit.techniques.codecs import CODECS
from memfit.techniques.compression import MemoryCompression
from memfit.techniques.compression_choice import choose

EXACT = MemoryCompression(compression_algorithm="exponent-split")


# -- data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["auto", *CODECS])
def test_any_tensor_comes_back_and_none_gets_bigger(algorithm: str) -> None:
    compression = MemoryCompression(compression_algorithm=algorithm)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64):
        for x in (
            torch.randn(40, 50).mul(9).to(dtype).T,
            torch.zeros(3, 0, 5, dtype=dtype),
            torch.tensor(1.0).to(dtype),
            torch.randn(7, 8).to(dtype)[::2, 1:6],
        ):
            packed = compression.compress(x)
            back = compression.decompress(packed)
            assert packed.nbytes <= x.nbytes and packed.original_nbytes == x.nbytes
            assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
            lossless = packed.codec == "raw" or CODECS[packed.codec].lossless
            same = torch.equal(back, x) if lossless else torch.allclose(back, x, rtol=0.3, atol=4.0)
            assert same, (dtype, packed.codec)


def test_arrays_and_bytes() -> None:
    compression = MemoryCompression()
    array = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)[:, ::3]
    back = compression.decompress(compression.compress(array))
    assert isinstance(back, np.ndarray) and np.array_equal(back, array)
    for data in (b"", b"x", b"memfit " * 5000, np.random.default_rng(1).bytes(5000)):
        for algorithm in ("auto", "gzip", "zstd", "lz4"):
            packed = MemoryCompression(compression_algorithm=algorithm).compress(data)
            assert MemoryCompression.decompress(compression, packed) == data
            assert len(packed) <= len(data) + 1
    assert len(compression.compress(b"memfit " * 5000)) < 300
    with pytest.raises(UsageError, match="int8 is for tensors; bytes take auto, zstd, lz4, gzip"):
        MemoryCompression(compression_algorithm="int8").compress(b"abc")
    with pytest.raises(InputError, match="not what compress made"):
        compression.decompress(b"\xff123")
    with pytest.raises(UsageError, match="cannot be compressed"):
        compression.compress(torch.eye(3).to_sparse())


def test_auto_takes_the_least_error_that_reaches_the_ratio() -> None:
    dense, sparse = torch.randn(20_000), torch.randn(20_000).relu()
    picked = {}
    for name, x, ratio, error in (
        ("lossless is enough", dense, 0.9, 0.0),
        ("lossless only", dense, 0.5, 0.0),
        ("16 bits", dense, 0.8, 0.01),
        ("8 bits", dense, 0.3, 0.01),
        ("4 bits", dense, 0.2, 0.2),
        ("out of reach", dense, 0.1, 0.01),
    ):
        compression = MemoryCompression(compression_ratio=ratio, max_error=error)
        picked[name] = compression.compress(x).codec
        assert compression.report().reached == (name not in ("lossless only", "out of reach"))
    assert list(picked.values()) == ["exponent-split", "exponent-split", "bf16", "int8", "int4", "int8"]
    zeros = choose(sparse, ("bitmap", "bf16"), target=0.7, max_error=0.01)
    assert zeros is not None and (zeros.codec, zeros.error) == ("bitmap", 0.0)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4096, np.uint8))
    assert choose(noise, CODECS, target=0.9, max_error=1.0) is None


def test_the_report_adds_up() -> None:
    compression = MemoryCompression(compression_algorithm="int8", compression_ratio=0.3)
    assert str(compression.report()) == "nothing was compressed yet"
    compression.compress(torch.randn(6400))
    compression.compress(torch.arange(3))
    report = compression.report()
    assert report.bytes_before == 25600 + 24 and report.by_codec["int8"].bytes_after == 6800
    assert "target 0.3 reached" in str(report) and json.loads(json.dumps(report.to_json()))["reached"] is True
    compression.reset_report()
    assert compression.report().ratio == 1.0
    assert MemoryCompression() == MemoryCompression(compression_ratio=0.8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression_algorithm": "zip"}, "compression_algorithm is one of auto, gzip"),
        ({"compression_ratio": 0}, "bytes after / bytes before"),
        ({"compression_ratio": 1.5}, "at most 1"),
        ({"max_error": -1}, "max_error"),
        ({"min_elements": 0}, "min_elements"),
        ({"blocks": "h.0"}, "a list of module names"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MemoryCompression(**settings)


# -- saved activations ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """ReLU's output is saved twice; three views of one storage are saved; a mask is."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 256),
            nn.Linear(256, width),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def _gradients(model: nn.Module, x: Tensor, passes: int = 1) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x).square().mean()
    for number in range(passes):
        loss.backward(retain_graph=number < passes - 1)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 32, 64)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_lossless_activations_change_no_bit(passes: int, autocast: bool) -> None:
    model, x = _net()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = _gradients(model, x, passes)
        compression = MemoryCompression(compression_algorithm="exponent-split")
        compression.apply(model)
        packed = _gradients(model, x, passes)
    assert all(torch.equal(a, b) for a, b in zip(plain, packed, strict=True))
    report = compression.report()
    assert report.ratio < (0.75 if autocast else 0.88)
    memfit.undo(model)
    _gradients(model, x)
    assert compression.report() == report, "nothing is compressed after undo"


def test_each_storage_is_compressed_once_and_no_parameter_is() -> None:
    model, x = _net()
    compression = MemoryCompression(compression_algorithm="int8")
    compression.apply(model)
    _gradients(model, x)
    numel = x.numel()
    # Of each block: its input, queries, keys and values in one storage, the attention's output, the sum after
    # it, ReLU's output (saved by itself and by the next layer), dropout's factors.
    total = compression.report().by_codec["int8"]
    assert total.bytes_before == 3 * 4 * numel * sum((1, 3, 1, 1, 4, 1))
    assert total.tensors == 3 * 6


def test_lossy_activations_stay_near() -> None:
    model, x = _net()
    plain = _gradients(model, x)
    for algorithm, bound in (("bf16", 0.01), ("int8", 0.02), ("fp8", 0.1), ("int4", 0.2), ("auto", 0.02)):
        compression = MemoryCompression(compression_algorithm=algorithm)
        compression.apply(model)
        packed = _gradients(model, x)
        memfit.undo(model)
        a, b = (torch.cat([gradient.view(-1) for gradient in found]) for found in (plain, packed))
        assert float((a - b).norm() / a.norm()) < bound, algorithm
        assert compression.exactness(model) == "approximate"
        assert compression.report().reached


def test_a_change_in_place_is_noticed_as_without() -> None:
    """What was compressed has its values; what was left alone may not change, as PyTorch says."""

    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.add_(1.0)
            return y

    for numel, noticed in ((100, True), (5000, False)):
        x = torch.randn(numel, requires_grad=True)
        model = EXACT.apply(Changes())
        loss = model(x).sum()
        if noticed:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
        else:
            loss.backward()
            assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
        memfit.undo(model)


def test_checkpointed_blocks_are_left_to_checkpointing() -> None:
    for first in (True, False):
        model, x = _net()
        plain = _gradients(model, x)
        compression = MemoryCompression(compression_algorithm="exponent-split")
        checkpointing = memfit.GradientCheckpointing(checkpoint_frequency=2)
        for technique in (compression, checkpointing) if first else (checkpointing, compression):
            technique.apply(model)
        assert all(torch.equal(a, b) for a, b in zip(plain, _gradients(model, x), strict=True))
        alone = MemoryCompression(compression_algorithm="exponent-split", blocks=["h.1"])
        other, _ = _net()
        alone.apply(other)
        _gradients(other, x)
        inputs = 0 if first else 2 * x.nbytes  # what the recomputed blocks keep, when hooks are around them
        assert compression.report().bytes_before == alone.report().bytes_before + inputs


def test_the_estimate_is_the_captured_peak() -> None:
    """Held against a capture of the step that really runs so."""

    def workload(model: Any) -> Workload:
        return Workload(
            name="net",
            model=model,
            batch=lambda: torch.randn(16, 64, 64),
            loss=lambda m, batch: m(batch).square().mean(),
        )

    def packed() -> nn.Module:
        return compression.apply(Net(6))

    for algorithm in ("int8", "bf16", "int4"):
        compression = MemoryCompression(compression_algorithm=algorithm)
        plain, real = capture_step(workload(lambda: Net(6))), capture_step(workload(packed))
        saving = compression.estimate(plain, Net(6))
        assert saving.peak_bytes == pytest.approx(plain.peak_bytes - real.peak_bytes, rel=0.12)


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_training_goes_on_from_a_compressed_checkpoint(tmp_path: Path) -> None:
    model, x = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    _gradients(model, x)
    optimizer.step()
    model.alias = model.h[0].up  # tied: stored once
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": 0.1 + 0.2}
    compression = MemoryCompression()
    path = compression.save(state, tmp_path / "deep" / "state.memfit")
    loaded = MemoryCompression.load(path)
    assert loaded["epoch"] == 3 and loaded["loss"] == 0.1 + 0.2
    for name, value in state["model"].items():
        assert torch.equal(loaded["model"][name], value)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(loaded["optimizer"])
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert compression.report().by_codec["exponent-split"].tensors < 3 * len(state["model"])
    torch.save(state, tmp_path / "state.pt")
    assert path.stat().st_size < 0.87 * (tmp_path / "state.pt").stat().st_size
    assert loaded["model"]["alias.weight"] is loaded["model"]["h.0.up.weight"]


def test_a_broken_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = EXACT.save({"w": torch.randn(5000), "n": None, "t": (1, [True])}, tmp_path / "s.memfit")
    assert EXACT.load(path)["t"] == (1, [True])
    whole = path.read_bytes()
    for broken in (whole[:-100], whole[:-300] + b"?" + whole[-299:], whole[:40], b"PK" + whole, b""):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"s\.memfit: "):
            EXACT.load(path)
    with pytest.raises(InputError, match="cannot read it"):
        EXACT.load(tmp_path / "none")
    with pytest.raises(UsageError, match=r"state\['f'\] is a function"):
        EXACT.save({"f": _net}, path)


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["exponent-split", "int8", "int4"])
def test_gradients_add_up_in_compressed_form(algorithm: str) -> None:
    model = nn.Linear(256, 64)
    pieces = torch.randn(32, 16, 256)
    for piece in pieces:
        model(piece).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sums = MemoryCompression(compression_algorithm=algorithm).gradient_accumulator(model)
    for piece in pieces:
        model(piece).square().mean().backward()
        sums.add()
        assert all(p.grad is None for p in model.parameters())
    held = sums.nbytes / sum(p.nbytes for p in plain)
    assert held < {"exponent-split": 0.86, "int8": 0.54, "int4": 0.43}[algorithm]
    sums.finish()
    assert sums.nbytes == 0
    for p, grad in zip(model.parameters(), plain, strict=True):
        error = float((p.grad - grad).norm() / grad.norm())
        assert error == 0.0 if algorithm == "exponent-split" else error < 0.005, error


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have torch loaded")
def test_gradients_between_ranks(tmp_path: Path) -> None:
    """Two real processes: what each method gives against the plain mean, and the bytes that it sent."""
    import torch.multiprocessing as mp
    from ranks_with_hooks import exchange

    mp.start_processes(exchange, args=(str(tmp_path),), nprocs=2, start_method="fork")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["fp16"]["ratio"] == figures["bf16"]["ratio"] == 0.5
    assert figures["fp16"]["error"] < 1e-3 and figures["bf16"]["error"] < 5e-3
    assert figures["topk"]["ratio"] == pytest.approx(0.2, rel=0.01)
    assert figures["powersgd"]["ratio"] is None
    for method in ("topk", "powersgd"):  # error feedback: what one step leaves out comes in later ones
        assert figures[method]["sum_error"] < 0.4 < figures[method]["error"]
    assert all(row["same_on_all_ranks"] for row in figures.values())


def test_hooks_say_what_they_need(one_process_group: None) -> None:
    from torch.nn.parallel import DistributedDataParallel

    with pytest.raises(UsageError, match="wrap the Linear in DistributedDataParallel first"):
        EXACT.compress_gradients(nn.Linear(2, 2))
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="method is one of fp16, bf16, powersgd, topk"):
        EXACT.compress_gradients(wrapped, "fp4")
    with pytest.raises(UsageError, match="topk has no setting 'rank'"):
        EXACT.compress_gradients(wrapped, "topk", rank=2)
