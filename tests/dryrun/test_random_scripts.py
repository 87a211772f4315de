"""Training scripts that nobody wrote end as they should: exit code, peak, and nothing left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from preloaded import Preloaded

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from random_scripts import ENDS, draw, trouble_of

pytestmark = pytest.mark.dryrun


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_script_drawn_by_chance(preloaded: Preloaded, tmp_path: Path, seed: int) -> None:
    assert trouble_of(seed, preloaded.run_words, tmp_path) == []


def test_a_seed_draws_the_same_script_and_every_end_is_drawn() -> None:
    assert draw(7) == draw(7)
    texts = [draw(seed).text for seed in range(300)]
    assert all(any(text.rstrip().endswith(end) for text in texts) for end, _ in ENDS)
