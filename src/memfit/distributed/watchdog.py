"""Ends a rank that hangs, so that its launcher starts all of them again; and says where it hung.

The timer is ``faulthandler``'s: a thread of C that needs no Python, so it also ends a rank that hangs in an
extension which holds the interpreter. It writes every thread's stack to a file first.
"""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path
from typing import IO

FIRST_STEP_FACTOR = 10.0
"""The first step of a process may take so many times as long: kernels are loaded, or compiled."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_WAITING = ("torch/distributed/", "torch/autograd/", "torch\\distributed\\", "torch\\autograd\\")


class Watchdog:
    """Ends this process when no `beat` came for ``timeout_seconds``.

    Uses the one timer that a process has (``faulthandler.dump_traceback_later``).
    """

    def __init__(self, folder: Path, *, rank: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / f"rank-{rank:05d}.txt").open("w", encoding="utf-8")
        self._first = True

    def beat(self) -> None:
        """Says that this rank is well, and begins to count anew."""
        timeout = self.timeout_seconds * (FIRST_STEP_FACTOR if self._first else 1.0)
        self._first = False
        faulthandler.dump_traceback_later(timeout, exit=True, file=self._file)

    def stop(self) -> None:
        """No longer watches."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


def read_hangs(folder: Path) -> dict[int, str]:
    """Where the ranks were that were ended, by rank: ``"hung at train.py:12 in load"``.

    A rank that stood in a collective or a backward pass waited for others, and is said to.
    """
    found = {}
    for path in sorted(folder.glob("rank-*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        frames = [match.groupdict() for match in map(_FRAME.match, _main_thread(text)) if match]
        if frames:
            found[int(path.stem.removeprefix("rank-"))] = _where(frames)
    return found


def _main_thread(text: str) -> list[str]:
    """The lines of the thread that faulthandler writes last: the first of the process."""
    return re.split(r"^(?:Current )?[Tt]hread .*$", text, flags=re.MULTILINE)[-1].splitlines()


def _where(frames: list[dict[str, str]]) -> str:
    waits = any(part in frame["file"] for frame in frames[:4] for part in _WAITING)
    own = next(
        (f for f in frames if "site-packages" not in f["file"] and "/lib/python" not in f["file"]), frames[0]
    )
    place = f"{Path(own['file']).name}:{own['line']} in {own['name']}"
    return f"waited for other ranks at {place}" if waits else f"hung at {place}"
