"""Growth: leaks are found at their true rate, and what only looks like one is not."""

from __future__ import annotations

import math
import random

import pytest

from memfit.monitor.estimates import growth, imbalance, seconds_to_oom

MIB = 1 << 20


def noisy(level: float, slope: float, steps: int, seed: int = 1) -> list[float]:
    """A step's end: noise of 5 MiB, and one step in eight far above."""
    draw = random.Random(seed)
    return [
        level + slope * step + draw.gauss(0, 5 * MIB) + (2000 * MIB if draw.random() < 0.12 else 0)
        for step in range(steps)
    ]


@pytest.mark.parametrize("slope_mib", [1, 7.5, 300])
def test_finds_a_leak_at_its_rate_among_noise_and_outliers(slope_mib: float) -> None:
    found = growth(range(120), noisy(8000 * MIB, slope_mib * MIB, 120))
    assert found is not None
    assert found.bytes_per_unit == pytest.approx(slope_mib * MIB, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_growth(seed: int) -> None:
    found = growth(range(200), noisy(8000 * MIB, 0, 200, seed))
    assert found is not None and found.bytes_per_unit == 0


@pytest.mark.parametrize(
    ("what", "held"),
    [
        ("a jump, as the optimizer's state is", [1e9] * 15 + [3e9] * 25),
        ("a cache that fills", [1e9 + 2e9 * (1 - math.exp(-step / 4)) // MIB * MIB for step in range(60)]),
        ("a saw", [1e9 + 1e8 * (step % 5) for step in range(60)]),
        ("shrinking", [9e9 - 1e7 * step for step in range(60)]),
        ("far too little to matter", [8e9 + 1000 * step for step in range(60)]),
    ],
)
def test_what_is_no_leak(what: str, held: list[float]) -> None:
    found = growth(range(len(held)), held)
    assert found is not None and found.bytes_per_unit == 0, what


def test_a_sampled_saw_that_rises_is_seen_through() -> None:
    """Samples within steps go up and down by gigabytes; what is held at the lowest grows."""
    held = [2e9 + 3e5 * second + 6e9 * (second % 7) / 7 for second in range(1500)]
    found = growth(range(1500), held)
    assert found is not None and found.bytes_per_unit == pytest.approx(3e5, rel=0.15)


def test_too_little_is_unknown() -> None:
    assert growth(range(5), [1, 2, 3, 4, 5]) is None
    assert growth([1.0] * 50, [float(value) for value in range(50)]) is None
    assert growth(range(40), [math.nan] * 40) is None


def test_time_to_oom() -> None:
    assert seconds_to_oom(1000, 10) == 100
    assert seconds_to_oom(1000, 0) == math.inf
    assert seconds_to_oom(None, 10) is None and seconds_to_oom(1000, None) is None


def test_imbalance() -> None:
    assert imbalance([10]) is None
    assert imbalance([10, 10, 10, 15]) == 0.5
