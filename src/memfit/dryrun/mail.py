"""Messages between ranks of a job that are run by themselves: files in a folder of the run.

Stages of a pipeline tell each other the shapes of what they pass on, and cannot go on without. So a rank
that receives such a message asks for its sender, the launcher runs that rank beside it, and the message comes
as it would. Large tensors are not sent: their values do not exist.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

MAIL_VARIABLE = "MEMFIT_MAIL"
WANTED, GONE = "wanted-", "gone-"
_POLL_SECONDS = 0.05


class Mailbox:
    """The messages of one rank; in order between each two ranks and for each kind.

    Args:
        folder: where all ranks of the run keep them.
        rank: this rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._counts: Counter[str] = Counter()

    @classmethod
    def of_this_process(cls) -> Mailbox | None:
        """None where ranks are not run side by side."""
        folder = os.environ.get(MAIL_VARIABLE)
        return cls(Path(folder), int(os.environ["RANK"])) if folder else None

    def post(self, kind: str, receiver: int, content: bytes) -> None:
        """Send to another rank."""
        path = self._next(kind, self._rank, receiver)
        whole = path.with_suffix(".part")
        whole.write_bytes(content)
        whole.rename(path)

    def take(self, kind: str, sender: int, *, seconds: float) -> bytes | None:
        """The next message of another rank, which is started for it; None if it sends none in time."""
        path = self._next(kind, sender, self._rank)
        deadline = time.monotonic() + seconds
        (self._folder / f"{WANTED}{sender}").touch()
        while not path.exists():
            ended = (self._folder / f"{GONE}{sender}").exists() and not path.exists()
            if ended or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return path.read_bytes()

    def _next(self, kind: str, sender: int, receiver: int) -> Path:
        name = f"{kind}-{sender}-{receiver}"
        self._counts[name] += 1
        return self._folder / f"{name}-{self._counts[name]}"


def wanted_ranks(folder: Path) -> set[int]:
    """Ranks that others wait for."""
    return {int(path.name.removeprefix(WANTED)) for path in folder.glob(f"{WANTED}*")}


def note_gone(folder: Path, rank: int) -> None:
    """Nothing more comes from ``rank``."""
    (folder / f"{GONE}{rank}").touch()
