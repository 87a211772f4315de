"""The user's own line of code that is running now, or that a traceback leads to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from memfit.dryrun.places import is_user_file

_MEMFIT = str(Path(__file__).resolve().parents[1]) + os.sep
_MACHINERY = ("<frozen runpy>", "<frozen importlib", "<string>")
_CALLING = ("torch/_ops.py", "torch/_compile.py")  # between an operation and what handles it


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


def is_script_file(name: str) -> bool:
    """Whether ``name`` is the user's own code: not a library's, nor what torch.compile wrote."""
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return is_user_file(name) and not (generated and name.startswith(generated))


def current_place() -> Place | None:
    """The innermost frame of the user's code in this thread; in a thread of autograd's, in the main thread.

    Where no frame is the user's, the innermost one that is neither torch's nor memfit's.
    """
    here = _innermost(sys._getframe(1))
    if here is not None:
        return here
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return _innermost(main)


def current_places() -> tuple[Place, Place]:
    """`current_place`, and the line of Python that reads: often a library's, torch's included."""
    stack = current_stack()
    nowhere = Place("", 0, "")
    if not stack:
        return nowhere, nowhere
    own = next((place for place in stack if is_script_file(place.file)), None)
    library = next((place for place in stack if not _is_machinery(place.file)), stack[0])
    return own or library, stack[0]


def current_stack() -> tuple[Place, ...]:
    """The lines that run in this thread, innermost first, without memfit's; in a thread of autograd's, those
    of the main thread."""
    frame: FrameType | None = sys._getframe(1)
    found = tuple(_lines(frame))
    if found:
        return found
    return tuple(_lines(sys._current_frames().get(threading.main_thread().ident or 0)))


def _lines(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_MEMFIT, *_MACHINERY)) and not name.endswith(_CALLING):
            yield Place(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def place_in_traceback(error: BaseException) -> Place | None:
    """The innermost frame of the user's code that ``error`` went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return Place(error.filename, error.lineno or 0, "")
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_script_file(code.co_filename):
            found = Place(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def _innermost(frame: FrameType | None) -> Place | None:
    library = None
    while frame is not None:
        name = frame.f_code.co_filename
        if is_script_file(name):
            return Place(name, frame.f_lineno, frame.f_code.co_name)
        if library is None and not _is_machinery(name):
            library = Place(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return library


def _is_machinery(name: str) -> bool:
    return name.startswith((_MEMFIT, *_MACHINERY)) or f"{os.sep}torch{os.sep}" in name


def without_memfit(error: BaseException, seen: set[int] | None = None) -> None:
    """Take memfit's own frames out of the traceback of ``error`` and of what it came from: what Python would
    show."""
    seen = set() if seen is None else seen
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _filtered(error.__traceback__)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            without_memfit(other, seen)


def _filtered(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((_MEMFIT, "<frozen runpy>")) and not _follows_memfit(kept, trace):
            kept.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for link in reversed(kept):
        result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result


def _follows_memfit(kept: list[TracebackType], trace: TracebackType) -> bool:
    """torch's own frames that are there only because memfit called the operation."""
    caller = trace.tb_frame.f_back
    return (
        caller is not None
        and caller.f_code.co_filename.startswith(_MEMFIT)
        and bool(kept)
        and (
            trace.tb_frame.f_code.co_filename.endswith(
                ("torch/_ops.py", "_python_dispatch.py", "_compile.py", "eval_frame.py")
            )
        )
    )
