"""The guard under Python's own file functions, in processes without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys, tarfile, tokenize                       # hold `open` under names of their own
from os import replace
from memfit.dryrun.writes import WriteSettings, guard_writes, real_files
guard_writes(WriteSettings(scratch=sys.argv[1], exempt=("/dev", "/proc")))
import glob, os, pathlib, shutil, sqlite3, subprocess, tempfile
"""

CASES = {
    "open in every mode": """
open("w.txt", "w").write("1"); open("old.txt", "a").write("+"); open("x.txt", "x").write("1")
file = open("old.txt", "r+"); assert file.read() == "old+"; file.write("!"); file.close()
assert open("old.txt").read() == "old+!"
try: open("x.txt", "x")
except FileExistsError: pass
else: raise SystemExit("x twice")
try: open("missing.txt", "r+")
except FileNotFoundError as error: assert error.filename == "missing.txt"
else: raise SystemExit("r+ made a file")
""",
    "os.open": """
fd = os.open("fd.bin", os.O_CREAT | os.O_WRONLY | os.O_EXCL); os.write(fd, b"1"); os.close(fd)
try: os.open("fd.bin", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
except FileExistsError: pass
else: raise SystemExit("exclusive twice")
folder = os.open(".", os.O_RDONLY)
os.unlink("old.txt", dir_fd=folder); assert not os.path.exists("old.txt")
""",
    "pathlib": """
path = pathlib.Path("a/b"); path.mkdir(parents=True); (path / "c.txt").write_text("c"); (path / "d").touch()
assert sorted(p.name for p in pathlib.Path("a").rglob("*")) == ["b", "c.txt", "d"]
(path / "c.txt").rename(path / "e.txt"); assert (path / "e.txt").read_text() == "c"
assert pathlib.Path("old.txt").stat().st_size == 3 and pathlib.Path("a").is_dir()
shutil.rmtree("a"); assert not path.exists()
""",
    "names taken before": """
open("t.tmp", "w").write("new"); replace("t.tmp", "old.txt"); assert open("old.txt").read() == "new"
with tarfile.open("t.tar", "w") as tar: tar.add("old.txt")
assert tarfile.open("t.tar").getnames() == ["old.txt"]
""",
    "temporary files": """
with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file: file.write("1")
os.replace(file.name, "t.txt"); assert open("t.txt").read() == "1"
with tempfile.TemporaryDirectory(dir=".") as folder: open(os.path.join(folder, "x"), "w").close()
assert not os.path.exists(folder)
""",
    "listing": """
open("new.txt", "w").close(); os.remove("old.txt")
assert sorted(os.listdir()) == ["folder", "new.txt"] and glob.glob("*.txt") == ["new.txt"]
with os.scandir(".") as entries: found = {entry.name: entry.is_dir() for entry in entries}
assert found == {"folder": True, "new.txt": False}
assert [names for _, _, names in os.walk("folder")] == [["inner.txt"]]
""",
    "links and times": """
os.symlink("old.txt", "link.txt"); assert open("link.txt").read() == "old"
os.link("old.txt", "hard.txt"); open("hard.txt", "w").write("new"); assert open("old.txt").read() == "old"
os.utime("old.txt", (5, 5)); os.chmod("old.txt", 0o600); os.truncate("old.txt", 1)
assert open("old.txt").read() == "o"
""",
    "a database": """
with sqlite3.connect("d.sqlite") as database: database.execute("create table t (x)")
assert os.path.getsize("d.sqlite") > 0
""",
    "a Python of its own": """
code = "open('child.txt', 'w').write('1'); print(open('child.txt').read())"
assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\\n"
assert open("child.txt").read() == "1"
""",
    "memfit's own files": """
with real_files(): open(sys.argv[2], "w").write("for real")
open("/dev/null", "w").write("x")
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "folder").mkdir(parents=True)
    (folder / "old.txt").write_text("old")
    (folder / "folder" / "inner.txt").write_text("inner")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_script_sees_its_writes_and_the_files_stay(project: Path, tmp_path: Path, case: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    own = tmp_path / "own.txt"
    command = [sys.executable, "-c", BEGIN + CASES[case], str(tmp_path / "scratch"), str(own)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before
    assert (project / "old.txt").read_text() == "old"
    assert own.exists() == (case == "memfit's own files")
