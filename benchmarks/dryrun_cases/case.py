"""What a case of the coverage table is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

EVERY = ("75", "80", "86", "89", "90", "100", "103", "120")
"""The compute capabilities of the catalogue, and one that no GPU of it has yet."""
REFERENCE = "90"
"""Whose figures the table shows."""
FEW = ("75", REFERENCE, "120")
ONE = (REFERENCE,)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small program, and where it is run.

    Args:
        run: the program.
        on: compute capabilities; all where they can change what PyTorch or a library does.
        since: below this one, a library itself must refuse, with a reason that names the capability.
        words: how it is started, with ``{}`` for the script; not in a fork, but as a command of its own.
        environment: variables to set.
    """

    run: Callable[[], None]
    on: tuple[str, ...] = FEW
    since: str = "75"
    words: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
