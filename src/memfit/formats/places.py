"""The line of the user's own code among the frames of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_THE_USERS = (
    "/site-packages/",
    "/dist-packages/",
    "\\site-packages\\",
    "<frozen ",
    "/memfit/dryrun/",
    "/memfit/profiling/",
    "/torch/",
    "\\torch\\",
)
_SOURCE = (".py", ".ipynb")
_MOST_FRAMES = 256
_LONGEST = 300


class Places:
    """Places by stack. A snapshot shares the stacks of its events, so each is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._texts: dict[str, str] = {}

    def of(self, frames: Any) -> str:
        """``"train.py:12 main"`` for the innermost frame of the user's own, or ``""``; frames come from the
        innermost out."""
        if not isinstance(frames, list) or not frames:
            return ""
        known = self._known.get(id(frames))
        if known is None:
            text = _place(frames)
            known = self._known[id(frames)] = self._texts.setdefault(text, text)
        return known


def _place(frames: list[Any]) -> str:
    library = ""
    for frame in frames[:_MOST_FRAMES]:
        if not isinstance(frame, Mapping):
            continue
        file = frame.get("filename")
        if not isinstance(file, str) or not file.endswith(_SOURCE) and "ipykernel" not in file:
            continue
        text = f"{file}:{frame.get('line')} {frame.get('name')}"[:_LONGEST]
        if not any(part in file for part in _NOT_THE_USERS):
            return text
        library = library or text
    return library
