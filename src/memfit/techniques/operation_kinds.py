"""Operators by kind: what the kernels of one operation are called on different devices, without namespace and
overload."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

HEAVY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("mm", "addmm", "_scaled_mm", "_int_mm", "_addmm_activation"),
        "attention": (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_flash_attention_forward",
            "_efficient_attention_forward",
        ),
        "convolution": ("convolution", "_convolution", "cudnn_convolution"),
    }
)
"""Kinds whose results are worth keeping."""


def kind_of(kinds: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    """The kind by the operator's name."""
    return MappingProxyType({base: kind for kind, bases in kinds.items() for base in bases})
