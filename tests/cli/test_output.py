from __future__ import annotations

from pathlib import Path

import pytest

from memfit.cli.output import check_output
from memfit.core.errors import UsageError


def check(path: Path) -> None:
    check_output(path, option="--report", suffixes=(".html",))


def test_a_good_path_leaves_nothing_behind(tmp_path):
    check(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_no_path_is_fine():
    check_output(None, option="--report", suffixes=(".html",))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--report .*there is no folder .*nowhere"):
        check(tmp_path / "nowhere" / "report.html")


def test_a_script_is_not_overwritten(tmp_path):
    with pytest.raises(UsageError, match=r"train\.py: name a file that ends in \.html"):
        check(tmp_path / "train.py")


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "r.html").mkdir()
    with pytest.raises(UsageError, match="this is a folder"):
        check(tmp_path / "r.html")


def test_a_folder_that_refuses_is_named_with_the_reason():
    with pytest.raises(UsageError, match="cannot write in /proc"):
        check(Path("/proc/report.html"))
