"""Histories: bounded in size, and no tier, zoom or restart loses a peak."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.monitor.history import History, HistoryWriter, Tier

TIERS = (
    Tier(name="samples", bucket_seconds=0, capacity=20),
    Tier(name="10s", bucket_seconds=10, capacity=15),
    Tier(name="100s", bucket_seconds=100, capacity=30),
    Tier(name="whole", bucket_seconds=math.inf, capacity=1),
)


@settings(max_examples=25)
@given(
    values=st.lists(st.none() | st.integers(0, 1 << 50), min_size=1, max_size=250),
    restarts=st.sets(st.integers(0, 249), max_size=3),
    points=st.integers(3, 60),
)
def test_never_loses_a_peak(
    values: list[int | None], restarts: set[int], points: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("history")
    writer = HistoryWriter(folder, ["used"], TIERS)
    for second, value in enumerate(values):
        if second in restarts:
            writer.close()
            writer = HistoryWriter(folder, ["used"], TIERS)
        writer.append(float(second), {"used": value})
    writer.close()
    known = [value for value in values if value is not None]
    history = History(folder, TIERS)
    series = history.series(points=points)
    assert len(series) <= points
    assert np.all(np.diff(series.time_seconds) >= 0)
    if known:
        assert history.whole()["used"] == max(known)
        assert np.nanmax(series.high["used"]) == max(known)
        assert np.nanmin(series.low["used"]) == min(known)
    newest = history.samples()
    assert [None if math.isnan(v) else v for v in newest.values["used"]] == values[-20:]


def test_a_stretch_of_time_is_as_fine_as_it_is_kept(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, ["used"], TIERS)
    for second in range(1000):
        writer.append(float(second), {"used": second % 97})
    writer.close()
    series = History(tmp_path, TIERS).series(begin_seconds=985, end_seconds=990)
    assert series.time_seconds.tolist() == [985, 986, 987, 988, 989]
    assert series.last["used"].tolist() == [second % 97 for second in range(985, 990)]
    early = History(tmp_path, TIERS).series(begin_seconds=100, end_seconds=300)
    assert early.time_seconds.tolist() == [100, 200]
    assert early.high["used"].tolist() == [96, 96]


def test_what_is_written_over_is_still_in_the_whole(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, ["used"], TIERS)
    writer.append(0.0, {"used": 10**12})
    for second in range(1, 9000, 7):
        writer.append(float(second), {"used": 5})
    writer.close()
    history = History(tmp_path, TIERS)
    assert np.nanmax(history.series(points=10**6).high["used"]) == 5
    assert history.whole() == {"used": 10**12}
