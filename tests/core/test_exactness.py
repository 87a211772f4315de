"""Grades of exactness: their order, what several add up to, and what a user's limit lets pass."""

from __future__ import annotations

import pytest

from memfit.core.exactness import EXACTNESS_ORDER, Exactness, allowed, weakest


def test_order() -> None:
    assert EXACTNESS_ORDER == ("exact", "reordered", "approximate", "changes training")


@pytest.mark.parametrize(
    ("grades", "together"),
    [
        ([], "exact"),
        (["exact", "exact"], "exact"),
        (["exact", "reordered"], "reordered"),
        (["approximate", "exact", "reordered"], "approximate"),
        (["changes training", "approximate"], "changes training"),
    ],
)
def test_several_are_as_the_least_exact(grades: list[Exactness], together: Exactness) -> None:
    assert weakest(grades) == together


def test_a_limit_lets_pass_what_is_as_exact_or_more() -> None:
    passed = [
        (grade, limit) for limit in EXACTNESS_ORDER for grade in EXACTNESS_ORDER if allowed(grade, limit)
    ]
    assert passed == [
        ("exact", "exact"),
        ("exact", "reordered"),
        ("reordered", "reordered"),
        ("exact", "approximate"),
        ("reordered", "approximate"),
        ("approximate", "approximate"),
        ("exact", "changes training"),
        ("reordered", "changes training"),
        ("approximate", "changes training"),
        ("changes training", "changes training"),
    ]
