"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from memfit.core.errors import UsageError
from memfit.core.files import write_atomically


def test_writes_text_and_bytes_and_makes_folders(tmp_path: Path) -> None:
    assert write_atomically(tmp_path / "a" / "b" / "text", "π").read_bytes() == "π".encode()
    assert write_atomically(tmp_path / "a" / "b" / "bytes", b"\x00").read_bytes() == b"\x00"
    assert sorted(entry.name for entry in (tmp_path / "a" / "b").iterdir()) == ["bytes", "text"]


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    ordinary, ours = tmp_path / "ordinary", tmp_path / "ours"
    ordinary.write_text("")
    write_atomically(ours, "")
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    ours.chmod(0o640)
    write_atomically(ours, "again")
    assert stat.S_IMODE(ours.stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match=r"cannot write .*file: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
