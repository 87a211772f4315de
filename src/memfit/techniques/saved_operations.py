"""Names of the operations whose outputs a checkpointed block keeps.

A name is a kind, or a kind and the operation's number among its kind in the block's forward: ``"linear"``,
``"linear:3"``, ``"attention"``, ``"convolution:0"``, ``"random"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import UsageError

KINDS: tuple[str, ...] = ("linear", "attention", "convolution", "normalization", "pointwise", "random")
"""``linear``: products with a weight matrix. ``attention``: fused attention, or the product that follows a
softmax. ``random``: what draws random numbers. ``pointwise``: operations that PyTorch tags so, in-place ones
not counted."""


@dataclass(frozen=True, kw_only=True)
class SavedOperations:
    """Which operations a block saves.

    Args:
        wanted: kind → the ordinals that are saved, ``None`` for all of the kind.
    """

    wanted: Mapping[str, frozenset[int] | None]

    @classmethod
    def parse(cls, names: Iterable[str], *, place: str) -> SavedOperations:
        """Reads names like ``"linear:0"``.

        Raises:
            UsageError: an unknown kind or a bad ordinal, with ``place`` in the message.
        """
        wanted: dict[str, frozenset[int] | None] = {}
        for name in names:
            kind, ordinal = _read_name(name, place)
            known = wanted.get(kind, frozenset())
            wanted[kind] = None if ordinal is None or known is None else known | {ordinal}
        return cls(wanted=wanted)

    def has(self, kind: str, ordinal: int) -> bool:
        ordinals = self.wanted.get(kind, frozenset())
        return ordinals is None or ordinal in ordinals


def check_names(names: Any, *, place: str) -> tuple[str, ...]:
    """The names as a tuple; UsageError for anything that is not a sequence of valid names."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError(f"{place} must be a list of names like 'linear:0', not {names!r}")
    for name in names:
        _read_name(name, place)
    return tuple(names)


def _read_name(name: Any, place: str) -> tuple[str, int | None]:
    kind, colon, ordinal = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in KINDS or (colon and not ordinal.isdigit()):
        raise UsageError(
            f"{place} cannot save {name!r}: give a kind ({', '.join(KINDS)}), alone or with the number of "
            "the operation among its kind, as in 'linear:0'"
        )
    return kind, int(ordinal) if colon else None
