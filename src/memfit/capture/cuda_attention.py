"""Which kernel CUDA takes for scaled dot-product attention, and the call of that kernel.

The rules are those of PyTorch's ``sdp_utils.cpp`` as CUDA-13 builds of torch 2.14 behave; the tests compare
them with what such a build chose on made-up GPUs of seven architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.torch_version import TorchVersion

aten = torch.ops.aten
Backend = Literal["flash", "efficient", "cudnn", "math"]

_HALVES = (torch.float16, torch.bfloat16)
EFFICIENT_TAKES_GROUPS = TorchVersion(torch.__version__) >= "2.14"
_MASK_ALIGNMENT = 16
_FLASH_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of attention, as far as the choice of its kernel depends on it.

    ``query``, ``key`` and ``value`` are shapes ``(batch, heads, length, head_dim)``.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    masked: bool = False
    mask_needs_gradient: bool = False
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    needs_gradient: bool = False
    dense_rows: bool = True  # the last dimension of all three has stride 1


def choose_attention(call: Attention, capability: tuple[int, int]) -> Backend:
    """The first kernel, in PyTorch's order for a GPU of this compute capability, that can run the call."""
    prefers_cudnn = capability[0] in (9, 10)
    order: tuple[Backend, ...] = (
        ("cudnn", "flash", "efficient") if prefers_cudnn else ("flash", "efficient", "cudnn")
    )
    for backend in order:
        if _RULES[backend](call, capability):
            return backend
    return "math"


def _common(call: Attention) -> bool:
    """Four dimensions, equal batch sizes, no empty sequence, dense rows, heads that match."""
    shapes = (call.query, call.key, call.value)
    if any(len(shape) != 4 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        return False
    if call.query[2] == 0 or call.key[2] == 0 or not call.dense_rows:
        return False
    heads, key_heads, value_heads = (shape[1] for shape in shapes)
    if not call.grouped:
        return heads == key_heads == value_heads
    return key_heads == value_heads and heads % key_heads == 0


def _flash(call: Attention, capability: tuple[int, int]) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled() or not (8, 0) <= capability <= (12, 1):
        return False
    head = call.query[-1]
    if call.masked or call.dtype not in _HALVES or head > 256 or not head == call.key[-1] == call.value[-1]:
        return False
    if call.causal and call.query[2] != call.key[2]:
        return False
    narrow = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if narrow and call.needs_gradient and head > 192 and (call.dropout > 0 or head <= 224):
        return False
    return _common(call)


def _efficient(call: Attention, capability: tuple[int, int]) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not (5, 0) <= capability <= (12, 1):
        return False
    allowed = (*_HALVES, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    head, value_head = call.query[-1], call.value[-1]
    alignment = _gemm_alignment(call.dtype, capability)
    if call.dtype not in allowed or head != call.key[-1] or head % alignment or value_head % alignment:
        return False
    if _groups_unfit(call):
        return False
    return _common(call)


def _gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    half = dtype in _HALVES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 8 if half else 4) if tensor_cores else least


def _cudnn(call: Attention, capability: tuple[int, int]) -> bool:
    if not torch.backends.cuda.cudnn_sdp_enabled() or not (8, 0) <= capability <= (12, 1):
        return False
    head, value_head = call.query[-1], call.value[-1]
    if call.dtype not in _HALVES or head % 8 or value_head % 8 or not _cudnn_heads(call, capability):
        return False
    if capability[0] == 10 and call.query[2] == 1:
        return False
    if (call.dropout * 16) % 1 or call.key[2] == 1 or (call.dropout > 0 and call.query[2] == 1):
        return False
    return _common(call) and not (call.masked and call.causal)


def _cudnn_heads(call: Attention, capability: tuple[int, int]) -> bool:
    head, value_head = call.query[-1], call.value[-1]
    if max(head, value_head) <= 128:
        return True
    if capability[0] not in (9, 10) or max(head, value_head) > 256:
        return False
    return not call.needs_gradient or (head, value_head) in ((192, 128), (256, 256))


def _groups_unfit(call: Attention) -> bool:
    """Before torch 2.14 the efficient kernel took no grouped heads."""
    return call.query[1] != call.key[1] and not EFFICIENT_TAKES_GROUPS


_RULES = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: tuple[int, int],
) -> torch.Tensor:
    """``scaled_dot_product_attention`` as a GPU of this compute capability runs it: the same tensors in the
    same order.
    """
    call = _described(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = choose_attention(call, capability)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(
            mask.logical_not(),
            float("-inf"),
            torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device),
        )
    if backend == "cudnn":
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.needs_gradient, dropout_p, is_causal, False, scale=scale
        )
    elif backend == "flash":
        return _flash_attention(query, key, value, dropout_p, is_causal, scale)
    elif backend == "efficient":
        bias = None if mask is None else _padded_mask(mask, query, key)
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, call.needs_gradient, dropout_p, is_causal, scale=scale
        )
    else:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    attended: torch.Tensor = out[0]
    return attended


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> Attention:
    inputs = (query, key, value)
    return Attention(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=query.dtype,
        masked=mask is not None,
        mask_needs_gradient=mask is not None and mask.requires_grad,
        dropout=dropout,
        causal=causal,
        grouped=grouped,
        needs_gradient=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
        dense_rows=all(tensor.stride(-1) == 1 for tensor in inputs),
    )


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The flash kernel works on head sizes in steps of 8; others are padded, and the result is cut."""
    head = query.shape[-1]
    scale = head**-0.5 if scale is None else scale
    missing = -head % _FLASH_ALIGNMENT
    if missing:
        query, key, value = (torch.constant_pad_nd(tensor, [0, missing]) for tensor in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out[..., :head] if missing else out


def _padded_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The efficient kernel wants rows of the mask that start at multiples of 16 elements."""
    length = mask.shape[-1]
    aligned = all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    if not aligned:
        mask = torch.constant_pad_nd(mask, [0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT])[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
