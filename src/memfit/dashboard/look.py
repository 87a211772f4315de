"""Colours of the parts of an account, on a light page and on a dark one; categories as everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.monitor.account import LABELS
from memfit.reports.palette import CATEGORY_PAINTS, Paint

_PARTS: Mapping[str, tuple[str, str]] = {
    "allocated": ("#0f766e", "#35b5a1"),
    "rounding": ("#b5a48b", "#cdbfa8"),
    "waiting": ("#0891b2", "#4cc3dd"),
    "cached": ("#93b5cf", "#55748f"),
    "stranded": ("#d97706", "#eda54a"),
    "context": ("#4a5568", "#8a97ab"),
    "outside": ("#6b5b95", "#a794d6"),
    "others": ("#be185d", "#f078ab"),
    "driver": ("#9ca3af", "#6b7280"),
    "free": ("#eef2f7", "#232a35"),
    "used": ("#2563eb", "#6ea1ff"),
}

PAINTS: Mapping[str, Paint] = {
    **CATEGORY_PAINTS,
    **{key: Paint(LABELS.get(key, key.capitalize()), *colours) for key, colours in _PARTS.items()},
}
"""Name and colours of every category and every part of an account."""


def paints_json() -> dict[str, dict[str, str]]:
    """The table for the page."""
    return {
        key: {"label": paint.label, "light": paint.light, "dark": paint.dark} for key, paint in PAINTS.items()
    }
