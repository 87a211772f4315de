"""Names and colours of the categories of memory: those of PyTorch's own memory timeline, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paint:
    """How one kind of bytes is named and coloured, on a light page and on a dark one."""

    label: str
    light: str
    dark: str


CATEGORY_PAINTS: Mapping[str, Paint] = {
    "parameter": Paint("Parameters", "#006400", "#3f9b4b"),
    "buffer": Paint("Buffers", "#5f9ea0", "#7fb8ba"),
    "optimizer_state": Paint("Optimizer state", "#daa520", "#e0b040"),
    "gradient": Paint("Gradients", "#0000cd", "#5b78ff"),
    "input": Paint("Inputs", "#000000", "#d8d8d8"),
    "activation": Paint("Activations", "#ff0000", "#ff5c52"),
    "temporary": Paint("Temporaries", "#9370db", "#a98cf0"),
    "workspace": Paint("Library workspaces", "#8b5a2b", "#c08a54"),
    "other": Paint("Other", "#808080", "#9a9a9a"),
}
"""In the order in which they are stacked, from what stays through a whole step to what comes and goes."""

ACCOUNT_PAINTS: Mapping[str, Paint] = {
    "context": Paint("CUDA context", "#4a5568", "#8a97ab"),
    "libraries": Paint("Libraries outside the allocator", "#718096", "#a6b1c2"),
    "rounding": Paint("Rounding up to blocks", "#b5a48b", "#cdbfa8"),
    "cached": Paint("Reserved, not in use at the peak", "#cbd5e0", "#5c6675"),
    "free": Paint("Free", "#f1f5f9", "#232a35"),
}

PAINTS: Mapping[str, Paint] = {**CATEGORY_PAINTS, **ACCOUNT_PAINTS}


def in_order(by_category: Mapping[str, int]) -> dict[str, int]:
    """The categories that hold anything, in stacking order; unknown names are added up under ``other``."""
    known = {name: by_category.get(name, 0) for name in CATEGORY_PAINTS}
    known["other"] += sum(size for name, size in by_category.items() if name not in CATEGORY_PAINTS)
    return {name: size for name, size in known.items() if size > 0}
