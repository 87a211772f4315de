"""The overlay as a file system: what was written is read back, and the folder below never changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfit.dryrun.overlay import Overlay


@pytest.fixture
def real(tmp_path: Path) -> Path:
    folder = tmp_path / "real"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("the user's a")
    (folder / "sub" / "b.txt").write_text("the user's b")
    return folder


@pytest.fixture
def overlay(real: Path, tmp_path: Path) -> Overlay:
    (tmp_path / "exempt").mkdir()
    return Overlay(str(tmp_path / "scratch"), exempt=[str(tmp_path / "exempt")])


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "/"
        for path in folder.rglob("*")
    }


def write(overlay: Overlay, path: Path, text: str) -> None:
    Path(overlay.for_writing(str(path), keep_content=False)).write_text(text)


def read(overlay: Overlay, path: Path) -> str:
    return Path(overlay.for_reading(str(path))).read_text()


def test_a_written_file_is_read_back_and_the_real_one_stays(overlay: Overlay, real: Path) -> None:
    before = tree(real)
    write(overlay, real / "a.txt", "new")
    assert read(overlay, real / "a.txt") == "new" and read(overlay, real / "sub" / "b.txt") == "the user's b"
    assert tree(real) == before


def test_updating_begins_with_the_old_content(overlay: Overlay, real: Path) -> None:
    path = overlay.for_writing(str(real / "a.txt"), keep_content=True)
    assert Path(path).read_text() == "the user's a"
    Path(path).write_text("updated")
    assert Path(overlay.for_writing(str(real / "a.txt"), keep_content=True)).read_text() == "updated"


def test_a_removed_file_is_hidden_until_it_is_made_again(overlay: Overlay, real: Path) -> None:
    overlay.remove(str(real / "a.txt"))
    assert not overlay.exists(str(real / "a.txt")) and overlay.names(str(real)) == ["sub"]
    with pytest.raises(FileNotFoundError):
        overlay.remove(str(real / "a.txt"))
    write(overlay, real / "a.txt", "again")
    assert sorted(overlay.names(str(real))) == ["a.txt", "sub"] and read(overlay, real / "a.txt") == "again"
    assert (real / "a.txt").read_text() == "the user's a"


def test_a_removed_folder_hides_what_was_in_it(overlay: Overlay, real: Path) -> None:
    with pytest.raises(OSError, match="not empty"):
        overlay.remove_folder(str(real / "sub"))
    overlay.remove(str(real / "sub" / "b.txt"))
    overlay.remove_folder(str(real / "sub"))
    assert not overlay.exists(str(real / "sub" / "b.txt"))
    overlay.make_folder(str(real / "sub"))
    assert overlay.names(str(real / "sub")) == [] and (real / "sub" / "b.txt").exists()


def test_renaming_moves_own_files_and_copies_the_users(overlay: Overlay, real: Path) -> None:
    before = tree(real)
    write(overlay, real / "new.tmp", "new")
    overlay.rename(str(real / "new.tmp"), str(real / "a.txt"))
    overlay.rename(str(real / "sub" / "b.txt"), str(real / "c.txt"))
    assert read(overlay, real / "a.txt") == "new" and read(overlay, real / "c.txt") == "the user's b"
    assert sorted(overlay.names(str(real))) == ["a.txt", "c.txt", "sub"]
    assert overlay.names(str(real / "sub")) == []
    assert tree(real) == before


def test_renaming_a_folder_takes_everything_along(overlay: Overlay, real: Path) -> None:
    write(overlay, real / "sub" / "new.txt", "new")
    overlay.rename(str(real / "sub"), str(real / "moved"))
    assert sorted(overlay.names(str(real / "moved"))) == ["b.txt", "new.txt"]
    assert not overlay.exists(str(real / "sub"))
    with pytest.raises(IsADirectoryError):
        overlay.rename(str(real / "a.txt"), str(real / "moved"))


def test_a_missing_folder_is_missing_for_the_script_too(overlay: Overlay, real: Path) -> None:
    with pytest.raises(FileNotFoundError):
        overlay.for_writing(str(real / "no" / "x.txt"), keep_content=False)
    with pytest.raises(NotADirectoryError):
        overlay.for_writing(str(real / "a.txt" / "x.txt"), keep_content=False)
    with pytest.raises(IsADirectoryError):
        overlay.for_writing(str(real / "sub"), keep_content=False)
    with pytest.raises(FileExistsError):
        overlay.make_folder(str(real / "sub"))


def test_a_write_through_a_link_goes_to_the_scratch_folder(overlay: Overlay, real: Path) -> None:
    (real / "link.txt").symlink_to(real / "a.txt")
    write(overlay, real / "link.txt", "new")
    assert (real / "a.txt").read_text() == "the user's a" and read(overlay, real / "a.txt") == "new"


def test_exempt_folders_are_written_for_real(overlay: Overlay, real: Path, tmp_path: Path) -> None:
    target = tmp_path / "exempt" / "x.txt"
    write(overlay, target, "real")
    overlay.rename(str(target), str(real / "x.txt"))
    assert not target.exists() and not (real / "x.txt").exists()
    assert read(overlay, real / "x.txt") == "real" and not os.path.exists(real / "x.txt")
