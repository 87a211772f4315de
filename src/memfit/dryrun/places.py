"""Where in the user's own code something happened: outside torch, memfit and installed packages."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from memfit.core.errors import WorkloadFailed

_MEMFIT = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_MESSAGE_LIMIT = 2000
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    return (_MEMFIT, *(os.path.join(folder, "") for folder in sorted(folders)))


def is_user_file(filename: str) -> bool:
    """Whether ``filename`` is the user's code: neither memfit's, nor installed, nor the standard library."""
    return not filename.startswith(_library_folders()) and not filename.startswith("<frozen")


def has_user_frame(error: BaseException) -> bool:
    """Whether any code of the user's was running when ``error`` was raised."""
    return any(is_user_file(frame.filename) for frame in traceback.extract_tb(error.__traceback__)[1:])


def user_place(error: BaseException) -> str:
    """``"file.py:12 in function"``: the user's innermost frame in ``error``, or else a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = _chosen_frame(error)
    return f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "unknown place"


def workload_failed(error: BaseException, doing: str) -> WorkloadFailed:
    """The error that tells that the user's code raised ``error``, with its type, text, file and line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error).strip() or "no message"
    shown = text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + " …"
    return WorkloadFailed(f"{doing} raised {type(error).__name__}: {shown} ({user_place(error)})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is torch's report that the device has no memory left."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def oom_value(error: BaseException, **known: Any) -> dict[str, Any]:
    """An out-of-memory error as a value, with the keys of `memfit.dryrun.result.OutOfMemory`.

    Args:
        known: keys that the caller knows better than the error's text tells: ``phase``, ``asked_bytes`` …
    """
    text = str(error)
    asked = re.search(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)", text)
    place = _chosen_frame(error)
    return {
        "file": place.filename if place else None,
        "line": (place.lineno or 0) if place else 0,
        "function": place.name if place else "",
        "op": "",
        "module": "",
        "phase": "",
        "asked_bytes": round(float(asked[1]) * _UNITS[asked[2]]) if asked else 0,
        "free_bytes": 0,
        "reserved_bytes": 0,
        "caught": False,
        "message": text,
    } | known


def _chosen_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, or else of a library other than torch, or else of any code."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if is_user_file(frame.filename)]
    library = [
        frame for frame in frames if not frame.filename.startswith(_MEMFIT) and _TORCH not in frame.filename
    ]
    return (own or library or frames)[-1] if frames else None
