"""How far a changed training step may move from the plain one: four grades, and what several add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from memfit.core.errors import UsageError

Exactness = Literal["exact", "reordered", "approximate", "changes training"]
"""``exact``: gradients, buffers and random state bitwise equal to the plain step. ``reordered``: the same
mathematics in another floating-point order. ``approximate``: a stated error.
``changes training``: something else is trained (adapters in place of the weights): no error can be stated."""

EXACTNESS_ORDER: tuple[Exactness, ...] = get_args(Exactness)


def checked_grade(allow: Exactness) -> Exactness:
    """The grade that a user accepts.

    Raises:
        UsageError: there is no such grade.
    """
    if allow not in EXACTNESS_ORDER:
        raise UsageError(f"allow={allow!r}: use one of {', '.join(EXACTNESS_ORDER)}")
    return allow


def weakest(grades: Iterable[Exactness]) -> Exactness:
    """The grade of several changes together: the least exact of theirs (``exact`` for none)."""
    return max(grades, key=EXACTNESS_ORDER.index, default="exact")


def allowed(grade: Exactness, allow: Exactness) -> bool:
    """Whether a change of ``grade`` may be used where ``allow`` is the least exact that the user accepts."""
    return EXACTNESS_ORDER.index(grade) <= EXACTNESS_ORDER.index(allow)
