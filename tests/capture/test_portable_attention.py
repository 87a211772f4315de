"""The choice of the attention kernel, against what a CUDA build of torch 2.14.1 chose on made-up GPUs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.capture.cuda_attention import EFFICIENT_TAKES_GROUPS, Attention, attention, choose_attention

GOLDEN: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "data" / "golden_attention.json.gz").read_bytes())
)
LETTERS = {"m": "math", "f": "flash", "e": "efficient", "c": "cudnn"}


def call_of(row: list[Any]) -> Attention:
    dtype, head, mask, dropout, causal, kv_heads, grouped, needs_gradient, queries, keys = row
    return Attention(
        query=(2, 8, queries, head),
        key=(2, kv_heads, keys, head),
        value=(2, kv_heads, keys, head),
        dtype=getattr(torch, dtype),
        masked=mask is not None,
        dropout=dropout,
        causal=causal,
        grouped=grouped,
        needs_gradient=needs_gradient,
    )


@pytest.mark.parametrize("capability", sorted(GOLDEN["choices"]))
def test_chooses_as_pytorch_chose(capability: str) -> None:
    major, minor = capability.split(".")
    for row, letter in zip(GOLDEN["rows"], GOLDEN["choices"][capability], strict=True):
        want = LETTERS[letter]
        if want == "efficient" and row[6] and not EFFICIENT_TAKES_GROUPS:
            continue
        assert choose_attention(call_of(row), (int(major), int(minor))) == want, row


def test_head_sizes_are_padded_for_flash() -> None:
    query = torch.empty(2, 4, 16, 60, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = attention(query, query, query, is_causal=True, capability=(8, 0))
    assert out.shape == query.shape
    assert not out.is_contiguous()  # a cut of the padded result
    out.sum().backward()
    assert query.grad is not None and query.grad.shape == query.shape


def test_mask_is_padded_for_the_efficient_kernel() -> None:
    query = torch.empty(2, 4, 20, 64, device="meta", requires_grad=True)
    mask = torch.ones(2, 1, 20, 20, device="meta", dtype=torch.bool)
    out = attention(query, query, query, mask, capability=(8, 6))
    assert "Efficient" in type(out.grad_fn).__name__
    out.sum().backward()


def test_kernels_that_the_user_turned_off_are_not_chosen() -> None:
    call = call_of(["bfloat16", 64, None, 0.0, True, 8, False, True, 128, 128])
    assert choose_attention(call, (8, 0)) == "flash"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert choose_attention(call, (8, 0)) == "math"
