"""From the name or the class of a policy to policies that place blocks in pieces of real memory."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TypeAlias

from memfit.allocators import ALLOCATORS, AddressSpaceConfig
from memfit.allocators.base import BaseAllocator
from memfit.core.errors import UsageError

PolicyName: TypeAlias = str | type[BaseAllocator]
"""A key of `ALLOCATORS`, or a subclass of `BaseAllocator`."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy that is made anew for each chunk of memory.

    Attributes:
        name: for people.
        kind: its class.
        trusted: one of memfit's own, whose tests hold it to its promises; what others place is checked.
    """

    name: str
    kind: type[BaseAllocator]
    trusted: bool

    def over(self, total_bytes: int, alignment_bytes: int) -> BaseAllocator:
        """The policy over an empty address space."""
        return self.kind(AddressSpaceConfig(total_bytes=total_bytes, alignment_bytes=alignment_bytes))


def find_policy(wanted: PolicyName) -> Policy:
    """The policy that ``wanted`` names or is.

    Raises:
        UsageError: no such name; the message has the names there are.
    """
    if isinstance(wanted, str):
        if wanted not in ALLOCATORS:
            close = difflib.get_close_matches(wanted, ALLOCATORS, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise UsageError(
                f"unknown allocation policy {wanted!r}: {meant}there are {', '.join(ALLOCATORS)}"
            )
        kind = ALLOCATORS[wanted]
        return Policy(name=wanted, kind=kind, trusted=kind.__module__.startswith("memfit."))
    if isinstance(wanted, type) and issubclass(wanted, BaseAllocator):
        return Policy(name=wanted.__name__, kind=wanted, trusted=wanted.__module__.startswith("memfit."))
    raise UsageError(f"allocation policy {wanted!r} is neither a name nor a subclass of BaseAllocator")
