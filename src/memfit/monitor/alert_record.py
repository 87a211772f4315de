"""Alerts that began and ended, kept on disk as JSON lines beside the history of the devices."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.core.files import write_atomically
from memfit.monitor.alerts import Change

LOGGER = logging.getLogger("memfit.monitor")
FILE = "alerts.jsonl"
MOST_KEPT = 2000
MOST_BYTES = 2 << 20
_NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "kind": str,
    "at_seconds": (int, float),
    "alert": str,
    "severity": str,
    "subject": str,
    "text": str,
}


class AlertRecord:
    """The record in a folder. A line that cannot be read is left out; a disk that is full loses lines only.

    Args:
        folder: that exists.
        writes: whether this process may write there.
        shown: how many earlier lines to keep at hand.

    Attributes:
        earlier: what was there when it was opened, the newest last.
    """

    def __init__(self, folder: Path, *, writes: bool, shown: int = 200) -> None:
        self._path = folder / FILE
        self._writes = writes
        lines = _lines(self._path)
        self.earlier: Sequence[Mapping[str, Any]] = lines[-shown:]
        if writes and len(lines) >= MOST_KEPT:
            write_atomically(self._path, "".join(_line(one) for one in lines[-MOST_KEPT // 2 :]))

    def add(self, at_seconds: float, change: Change) -> None:
        """Keep a change."""
        if not self._writes:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(change_json(at_seconds, change)))
        except OSError as error:
            LOGGER.debug("an alert could not be kept: %s", error)


def change_json(at_seconds: float, change: Change) -> dict[str, Any]:
    """An alert that began or ended, as plain values."""
    return {"kind": change.kind, "at_seconds": at_seconds, **change.alert.to_json()}


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """The last changes that a file holds; of one that has grown too large only its end is read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            texts = deque(file.read().splitlines(), maxlen=MOST_KEPT)
    except OSError:
        return []
    return [values for text in texts if (values := _change(text)) is not None]


def _change(text: bytes) -> Mapping[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(values, dict) and all(
        isinstance(values.get(name), kind) for name, kind in _NEEDED.items()
    )
    return values if whole else None
