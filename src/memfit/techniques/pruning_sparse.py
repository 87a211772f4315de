"""Pruned weights in a sparse layout, for inference: CSR anywhere, 2:4 on sparse tensor cores; where it pays.

CSR keeps a value and a 4-byte column for each weight that is left, and a 4-byte offset for each row: with
fp32 values it is smaller below half of the weights, and it is usually faster only far below that. 2:4 keeps
half of the values and two bits for each.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memfit.core.errors import UsageError

Layout = Literal["csr", "2:4"]
RUNS = 7
INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """What became of one layer.

    Attributes:
        name: of the layer.
        density: the share of weights that are not zero.
        dense_bytes, sparse_bytes: of the weight in both layouts.
        dense_seconds, sparse_seconds: of the layer on the sample, where one was given.
        converted: whether it is sparse now.
        reason: why it is not.
    """

    name: str
    density: float
    dense_bytes: int
    sparse_bytes: int
    dense_seconds: float | None = None
    sparse_seconds: float | None = None
    converted: bool = False
    reason: str = ""


class SparseLinear(nn.Module):
    """A linear layer for inference with a sparse weight."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of any shape with the layer's features last."""
        rows = x.reshape(-1, x.shape[-1])
        product = (self.weight @ rows.T).T
        product = product if self.bias is None else product + self.bias
        return product.reshape(*x.shape[:-1], product.shape[-1])


def csr_bytes(weight: Tensor) -> int:
    """Bytes of a matrix in CSR with 4-byte indices."""
    left = int(torch.count_nonzero(weight))
    return left * (weight.element_size() + INDEX_BYTES) + (weight.shape[0] + 1) * INDEX_BYTES


def two_four_bytes(weight: Tensor) -> int:
    """Bytes of a matrix with two of four values kept: half the values, two bits for each kept one."""
    return weight.numel() // 2 * weight.element_size() + weight.numel() // 8


def to_sparse(
    model: nn.Module, *, layout: Layout = "csr", sample_rows: int | None = None
) -> tuple[SparseLayer, ...]:
    """Puts sparse layers in the place of linear ones where the weight becomes smaller, in place.

    For inference: a sparse layer does not train. The zeros must be there already (`memfit.Pruning`).

    Args:
        layout: ``"csr"``, or ``"2:4"`` (CUDA, Ampere or later, fp16 or bf16).
        sample_rows: also measures both forms on as many rows, and converts only what is not slower.

    Returns:
        one row for each linear layer, converted or not.

    Raises:
        UsageError: an unknown layout, or 2:4 on a device that has no sparse tensor cores.
    """
    if layout not in ("csr", "2:4"):
        raise UsageError(f"layout {layout!r}: use csr or 2:4")
    rows = []
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            row, sparse = _considered(name, layer, layout, sample_rows)
            rows.append(row)
            if sparse is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, sparse)
    return tuple(rows)


def _considered(
    name: str, layer: nn.Linear, layout: Layout, sample_rows: int | None
) -> tuple[SparseLayer, SparseLinear | None]:
    weight = layer.weight.detach()
    dense = weight.numel() * weight.element_size()
    density = float(torch.count_nonzero(weight)) / weight.numel()
    size = csr_bytes(weight) if layout == "csr" else two_four_bytes(weight)
    row = SparseLayer(name=name, density=density, dense_bytes=dense, sparse_bytes=size)
    if layout == "2:4" and not is_two_four(weight):
        return replace(row, reason="not two of each four weights are zero"), None
    if size >= dense:
        return replace(row, reason="the sparse form is not smaller"), None
    sparse = SparseLinear(_sparse(weight, layout, name), layer.bias)
    if sample_rows is None:
        return replace(row, converted=True), sparse
    sample = torch.randn(sample_rows, layer.in_features, dtype=weight.dtype, device=weight.device)
    row = replace(row, dense_seconds=_seconds(layer, sample), sparse_seconds=_seconds(sparse, sample))
    if (row.sparse_seconds or 0.0) > (row.dense_seconds or 0.0):
        return replace(row, reason="the sparse form is slower"), None
    return replace(row, converted=True), sparse


def is_two_four(weight: Tensor) -> bool:
    """Whether at least two of each four weights along the rows are zero."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight.reshape(-1, 4) != 0).sum(1) <= 2).all())


def _sparse(weight: Tensor, layout: Layout, name: str) -> Tensor:
    if layout == "csr":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            csr = weight.to_sparse_csr()
            return torch.sparse_csr_tensor(
                csr.crow_indices().int(),
                csr.col_indices().int(),
                csr.values(),
                csr.shape,
                check_invariants=True,
            )
    if weight.device.type != "cuda":
        raise UsageError(f"{name}: 2:4 runs on CUDA's sparse tensor cores only, not on {weight.device.type}")
    from torch.sparse import to_sparse_semi_structured

    return to_sparse_semi_structured(weight.contiguous())


def _seconds(run: Callable[[Tensor], Any], sample: Tensor) -> float:
    """The median over a few runs, the first one left out."""
    seconds = []
    with torch.no_grad():
        for _ in range(RUNS):
            begun = time.perf_counter()
            run(sample)
            if sample.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])
