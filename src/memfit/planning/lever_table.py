"""All levers beside recomputation, loss, micro-batches and allocator: a new one is a file and a line here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from memfit.core.exactness import Exactness, allowed
from memfit.planning.lever_kinds import LeverKind
from memfit.planning.levers_activations import PACKED
from memfit.planning.levers_optimizer import IN_BACKWARD, SMALL_STATE, STATE_ON_HOST
from memfit.planning.levers_parameters import ON_HOST
from memfit.planning.levers_precision import BF16, BF16_WEIGHTS

LEVER_KINDS: tuple[LeverKind, ...] = (
    IN_BACKWARD,
    SMALL_STATE,
    STATE_ON_HOST,
    BF16,
    BF16_WEIGHTS,
    PACKED,
    ON_HOST,
)


def combinations(allow: Exactness, *, most: int = 3) -> Iterator[tuple[LeverKind, ...]]:
    """Sets of levers within ``allow`` that go together, the smallest first: at most ``most`` at once."""
    kinds = [kind for kind in LEVER_KINDS if allowed(kind.exactness, allow)]
    for count in range(1, most + 1):
        for chosen in itertools.combinations(kinds, count):
            if all(_together(a, b) for a, b in itertools.combinations(chosen, 2)):
                yield chosen


def _together(a: LeverKind, b: LeverKind) -> bool:
    return a.axis != b.axis and b.name not in a.apart and a.name not in b.apart
