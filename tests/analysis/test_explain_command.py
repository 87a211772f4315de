"""`memfit explain` as it is typed: files, pipes, JSON, exit codes; and without torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit import cli

CASES = Path(__file__).parents[1] / "data" / "cases"
MESSAGE = CASES / "01-oom-big-tensor-fragmented" / "message.txt"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(["explain", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_page_that_is_read_in_a_minute(run: Run) -> None:
    code, out, err = run(MESSAGE)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("✗ Fragmentation  sure")
    assert len(lines) < 50 and max(map(len, lines)) <= 100
    assert "       export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in lines
    assert "Saves up to 10.84 GiB." in out


def test_several_files_are_one_failure(run: Run) -> None:
    code, out, _ = run(*sorted((CASES / "07-oom-bare-cuda-error-ranks-on-gpu0").iterdir()))
    assert code == 0 and out.startswith("✗ Another process holds the memory") and "3 x 725 = 2175 MiB" in out


@pytest.mark.parametrize("words", [(), ("-",), ("-", CASES / "33-alloc-conf-strings" / "values.jsonl")])
def test_pipes(words: tuple[object, ...], run: Run) -> None:
    code, out, _ = run("--json", *words, stdin=MESSAGE.read_bytes())
    value = json.loads(out)
    assert code == 0 and value["findings"][0]["verdict"] == "fragmentation"
    assert value["inputs"][0]["name"] == "stdin"


def test_nothing_known_is_no_failure(run: Run) -> None:
    code, out, _ = run(stdin=b"all went well\n")
    assert code == 0 and "No error about memory was recognized" in out and "memfit explain error.txt" in out


@pytest.mark.parametrize("content", [None, b"", b"\x93\x00\xff\x81" * 999])
def test_what_cannot_be_read_exits_with_5(content: bytes | None, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(path)
    assert (code, out) == (5, "") and str(path) in err and "Traceback" not in err


def test_works_without_torch() -> None:
    """On a laptop: importing torch is an error, and a snapshot and a message are explained."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from memfit.cli import main\n"
        f"code = main(['explain', '--json', {str(MESSAGE)!r}])\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fragmentation"
