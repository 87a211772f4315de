"""Offline packing against brute force, a naive validator, published problems and recorded traces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocators.lifetimes import Lifetimes, lifetimes_of, read_lifetimes
from memfit.allocators.packing import offsets_in_allocation_order, pack
from memfit.allocators.packing_heuristics import first_fit
from memfit.allocators.packing_search import search
from memfit.allocators.validate import packing_problem
from memfit.core.errors import InputError, UsageError
from memfit.core.trace import Action, TraceBuilder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CAPACITY_BYTES = 1_048_576

GAP = [(1, 4, 2), (0, 3, 2), (4, 6, 3), (0, 1, 3), (3, 4, 1), (5, 6, 2), (3, 5, 1), (1, 2, 1), (2, 5, 1)]
"""A problem with a peak that no packing reaches."""

rows = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 40)).map(
        lambda row: (row[0], row[0] + row[1], row[2])
    ),
    max_size=24,
)


def least_height(lifetimes: Lifetimes) -> int:
    """By trying every order: each block on top of what lies under it."""
    columns = (lifetimes.lower, lifetimes.upper, lifetimes.size_bytes)
    blocks = list(zip(*(column.tolist() for column in columns), strict=True))

    def least_above(placed: list[tuple[int, int, int]], left: list[tuple[int, int, int]], bound: int) -> int:
        if not left:
            return max((top for _, _, top in placed), default=0)
        for index, (lower, upper, size) in enumerate(left):
            top = size + max((t for born, died, t in placed if born < upper and lower < died), default=0)
            if top < bound:
                rest = left[:index] + left[index + 1 :]
                bound = min(bound, least_above([*placed, (lower, upper, top)], rest, bound))
        return bound

    return least_above([], blocks, sum(size for _, _, size in blocks) + 1)


def cut_into_blocks(generator: random.Random, *, width: int, height: int, cuts: int) -> Lifetimes:
    """A rectangle of time by memory, cut up: a packing without any waste exists."""
    pieces = [(0, width, height)]
    for _ in range(cuts):
        index = max(
            range(len(pieces)),
            key=lambda i: (pieces[i][1] - pieces[i][0]) * pieces[i][2] * generator.random(),
        )
        lower, upper, size = pieces.pop(index)
        if (generator.random() < 0.5 and upper - lower > 1) or size == 1:
            at = generator.randrange(lower + 1, upper) if upper - lower > 1 else None
            pieces += [(lower, at, size), (at, upper, size)] if at else [(lower, upper, size)]
        else:
            at = generator.randrange(1, size)
            pieces += [(lower, upper, at), (lower, upper, size - at)]
    generator.shuffle(pieces)
    return Lifetimes.of(pieces)


@given(rows)
@settings(max_examples=150, deadline=None)
def test_every_packing_is_valid_and_no_lower_than_the_peak(table: list[tuple[int, int, int]]) -> None:
    lifetimes = Lifetimes.of(table)
    packing = pack(lifetimes, effort=2_000)
    assert packing_problem(lifetimes, packing.offsets.tolist(), capacity_bytes=packing.height_bytes) is None
    live = [sum(size for lower, upper, size in table if lower <= moment < upper) for moment in range(16)]
    assert packing.peak_live_bytes == max(live)
    assert packing.peak_live_bytes <= packing.lower_bound_bytes <= packing.height_bytes


def test_the_search_finds_the_least_height_and_proves_that_no_lower_one_exists() -> None:
    generator = random.Random(7)
    for _ in range(60):
        table = []
        for _ in range(generator.randint(1, 7)):
            lower = generator.randrange(6)
            table.append((lower, generator.randint(lower + 1, 7), generator.randint(1, 6)))
        lifetimes = Lifetimes.of(table)
        least = least_height(lifetimes)
        found = search(lifetimes, capacity_bytes=least, node_limit=100_000)
        assert found.offsets is not None
        assert packing_problem(lifetimes, found.offsets.tolist(), capacity_bytes=least) is None
        below = search(lifetimes, capacity_bytes=least - 1, node_limit=100_000)
        assert (below.offsets, below.proven) == (None, True)


def test_a_height_above_the_peak_is_proven_where_none_at_the_peak_exists() -> None:
    # Found by a random search over small problems; confirmed by brute force here.
    lifetimes = Lifetimes.of(GAP)
    least = least_height(lifetimes)
    assert least > lifetimes.peak_live_bytes
    packing = pack(lifetimes)
    assert (packing.height_bytes, packing.optimal) == (least, True)


@pytest.mark.parametrize("seed", range(4))
def test_a_rectangle_cut_into_blocks_is_put_together_again(seed: int) -> None:
    lifetimes = cut_into_blocks(random.Random(seed), width=40, height=1000, cuts=60)
    packing = pack(lifetimes, effort=40_000)
    assert packing.height_bytes == 1000
    assert packing_problem(lifetimes, packing.offsets.tolist(), capacity_bytes=1000) is None


def test_independent_stretches_of_time_are_packed_apart() -> None:
    lifetimes = Lifetimes.of([(0, 2, 5), (2, 4, 7), (1, 2, 3), (3, 4, 1)])
    assert [part.tolist() for part in lifetimes.independent_parts()] == [[0, 2], [1, 3]]
    assert pack(lifetimes).height_bytes == 8


def test_offsets_and_height_follow_the_alignment() -> None:
    lifetimes = Lifetimes.of([(0, 3, 1), (1, 4, 513), (2, 5, 100)])
    packing = pack(lifetimes, alignment_bytes=512)
    assert packing.height_bytes == packing.peak_live_bytes == 4 * 512
    assert packing_problem(lifetimes, packing.offsets.tolist(), alignment_bytes=512) is None


def test_packing_twice_gives_the_same() -> None:
    lifetimes = cut_into_blocks(random.Random(11), width=30, height=500, cuts=50)
    one, two = pack(lifetimes, effort=5_000), pack(lifetimes, effort=5_000)
    assert np.array_equal(one.offsets, two.offsets) and one.method == two.method


def test_no_blocks_need_no_memory() -> None:
    packing = pack(Lifetimes.of([]))
    assert (packing.height_bytes, packing.optimal, packing.excess) == (0, True, 0.0)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0], "1 offsets for 2 blocks"),
        ([-8, 0], "block 0 has the negative offset -8"),
        ([0, 12], "block 1 at 12 is not aligned to 8"),
        ([0, 16], "block 1 ends at 24, above the capacity 16"),
        ([0, 0], "blocks 0 and 1 live at the same time and overlap"),
        ([0, 8], None),
    ],
)
def test_the_validator_says_which_rule_is_broken(offsets: list[int], words: str | None) -> None:
    lifetimes = Lifetimes.of([(0, 2, 8), (1, 3, 8)])
    assert packing_problem(lifetimes, offsets, capacity_bytes=16, alignment_bytes=8) == words


def test_lifetimes_of_a_trace() -> None:
    builder = TraceBuilder()
    first = builder.alloc(100)
    builder.free(-1, size_bytes=50)
    second = builder.alloc(200)
    builder.append(Action.SEGMENT_ALLOC, size_bytes=1 << 20)
    builder.free(first)
    builder.alloc(0)
    found = lifetimes_of(builder.build())
    assert list(zip(found.lower, found.upper, found.size_bytes, strict=True)) == [
        (0, 4, 100),
        (2, 6, 200),
        (-1, 1, 50),
    ]
    assert second == 1
    assert len(offsets_in_allocation_order(found, pack(found))) == 3


@pytest.mark.parametrize(
    ("row", "rule"), [((3, 3, 8), "begin before it ends"), ((0, 1, 0), "size must be at least 1")]
)
def test_impossible_lifetimes_are_refused(row: tuple[int, int, int], rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        Lifetimes.of([(0, 1, 1), row])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,lower,size\n0,1,2\n", "no column 'upper'"),
        ("lower,upper,size\n0,1,x\n", "near line 2"),
        ("lower,upper,size\n2,1,4\n", "begin before"),
    ],
)
def test_a_broken_problem_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "problem.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_lifetimes(file)
    with pytest.raises(InputError, match="cannot read"):
        read_lifetimes(tmp_path / "missing.csv")


def test_alignment_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="alignment_bytes=0"):
        pack(Lifetimes.of([(0, 1, 1)]), alignment_bytes=0)


def test_first_fit_fills_the_lowest_gap() -> None:
    lifetimes = Lifetimes.of([(0, 9, 4), (0, 3, 4), (0, 9, 4), (4, 9, 4)])
    assert first_fit(lifetimes, np.arange(4)).tolist() == [0, 4, 8, 4]


@pytest.mark.parametrize("name", "ABCDEFGHIJK")
def test_the_published_problems_fit_their_capacity(shared_folder: Path, name: str) -> None:
    lifetimes = read_lifetimes(shared_folder / "truth" / "minimalloc" / f"{name}.{CAPACITY_BYTES}.csv")
    packing = pack(lifetimes, capacity_bytes=CAPACITY_BYTES, effort=50_000)
    assert packing_problem(lifetimes, packing.offsets.tolist(), capacity_bytes=CAPACITY_BYTES) is None


def test_recorded_traces_pack_within_one_percent_of_their_live_peak(shared_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "packing.py"), "traces", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MEMFIT_SHARED": str(shared_folder)},
    )
    rows = json.loads(done.stdout)
    assert len(rows) >= 6
    for row in rows:
        assert row["problem"] is None
        assert 0 <= row["excess_percent"] < 1, row
