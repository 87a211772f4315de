"""Where in the user's code something was asked for: cheap to note, readable when shown."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_OWN_FILES = (_OWN_FOLDER, os.path.join(os.path.dirname(os.path.dirname(__file__)), "manager.py"))


class Site(NamedTuple):
    """A place in source code; its text is ``"train.py:12 load"``."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_shortened(self.file)}:{self.line} {self.function}"


def calling_site() -> Site:
    """The line of code outside of the pools and the manager that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FILES):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return Site("?", 0, "?")


def _shortened(path: str) -> str:
    """Relative to the current folder where that is inside of it."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
