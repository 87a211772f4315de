"""The KV caches of transformers by name, for `memfit.planning.evaluate_generation`. Child side.

``dynamic`` grows token by token (and slides where the model's layers do), ``static`` is allocated once for
the whole length, ``int8`` and ``int4`` are transformers' quantised layers: the last 128 positions as they
are, the rest in groups of 64 values with a scale and a zero point. Their back-ends (quanto, HQQ) are optional
packages; the packing here takes the bytes that theirs take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

GROUP = 64

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]


def _dynamic(config: Any, length: int) -> Any:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config)


def _static(config: Any, length: int) -> Any:
    from transformers.cache_utils import StaticCache

    return StaticCache(config=config, max_cache_len=length)


def _quantised(bits: int) -> Callable[[Any, int], Any]:
    def build(config: Any, length: int) -> Any:
        from transformers.cache_utils import Cache, QuantizedLayer

        class Layer(QuantizedLayer):
            def _quantize(self, tensor: torch.Tensor, axis: int = 0) -> Packed:
                return pack(tensor, bits)

            def _dequantize(self, parts: Packed) -> torch.Tensor:
                return unpack(parts, bits)

        layers = config.get_text_config(decoder=True).num_hidden_layers
        return Cache(layers=[Layer(nbits=bits, q_group_size=GROUP) for _ in range(layers)])

    return build


CACHES: Mapping[str, Callable[[Any, int], Any]] = MappingProxyType(
    {"dynamic": _dynamic, "static": _static, "int8": _quantised(8), "int4": _quantised(4)}
)
"""``(config, length in tokens) -> cache``."""


def pack(tensor: torch.Tensor, bits: int) -> Packed:
    """Codes of ``bits`` bits (two to a byte at 4), scales and zero points per group of `GROUP` values, and
    the shape. The last group is filled up with zeros."""
    flat = tensor.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(tensor.dtype).tiny)
    codes = ((flat - low) / scale).round().to(torch.uint8)
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return codes, scale, low, tensor.shape


def unpack(parts: Packed, bits: int) -> torch.Tensor:
    """The tensor that `pack` was given, within half a step of its scale."""
    codes, scale, low, shape = parts
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).view(codes.shape[0], -1)
    values = codes.to(scale.dtype) * scale + low
    return values.reshape(-1)[: shape.numel()].view(shape)


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, each storage once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
