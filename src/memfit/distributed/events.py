"""What happened to a training run: saved, resumed, fell back, could not save, hung. Said in the log and
kept."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LOGGER = logging.getLogger("memfit.distributed")
RECORDS_VARIABLE = "MEMFIT_LAUNCH_RECORDS"
"""Names the folder in which `memfit launch` collects what its ranks tell."""
EVENTS_FILE = "events.jsonl"

EventKind = Literal[
    "saved", "resumed", "corrupt", "unfinished", "not_saved", "hung", "fewer_ranks", "more_ranks"
]
_LEVELS = {"saved": logging.DEBUG, "resumed": logging.INFO}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: what.
        step: at which step; of the checkpoint, where it is about one.
        text: in words.
        time_seconds: since the epoch.
    """

    kind: EventKind
    step: int
    text: str
    time_seconds: float


class EventLog:
    """The events of this process, said in the log ``memfit.distributed`` and, by one rank, kept in a file."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.events: list[Event] = []
        told = os.environ.get(RECORDS_VARIABLE)
        self._files = [folder / EVENTS_FILE, *([Path(told) / EVENTS_FILE] if told else [])] if keep else []

    def tell(self, kind: EventKind, step: int, text: str) -> None:
        """Notes an event. A file that cannot be written is passed over: the log has it."""
        event = Event(kind=kind, step=step, text=text, time_seconds=time.time())
        self.events.append(event)
        if not self._files:
            return
        LOGGER.log(_LEVELS.get(kind, logging.WARNING), "%s", text)
        for path in self._files:
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(event)) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events that are kept in a folder, oldest first; a last line that was cut off is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / EVENTS_FILE).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
