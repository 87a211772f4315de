"""A hash of each tensor on the device that it lies on: equal bits, equal hash, at the speed of memory.

64 bits a tensor: every word is mixed with its position (splitmix64's finisher) and all are added up, modulo
2^64. A single changed word always changes the sum; two changes cancel out once in 2^64. Only the sums leave
the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_WORDS = 1 << 22
"""Words that are mixed at once: the hash needs some 100 MB beside the tensors."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One 64-bit hash of each tensor's bits, as int64 on the CPU; tensors that differ in shape may agree."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    return torch.stack([_fingerprint(tensor).cpu() for tensor in tensors])


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, words.numel(), CHUNK_WORDS):
        piece = words[first : first + CHUNK_WORDS].to(torch.int64, copy=True)  # it is mixed in place
        place = torch.arange(first + 1, first + 1 + piece.numel(), device=tensor.device).mul_(_GOLDEN)
        total += _mixed(piece.add_(place)).sum()
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's finisher, in place; each step can be undone, so no two words become one."""
    words ^= _shifted(words, 30)
    words *= _FIRST
    words ^= _shifted(words, 27)
    words *= _SECOND
    words ^= _shifted(words, 31)
    return words


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right with zeros, as unsigned words are."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
