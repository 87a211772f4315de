"""The one tree of errors that memfit raises.

    MemfitError
    ├── UsageError      what was asked for cannot be meant (unknown GPU, bad size, unknown key)
    ├── InputError      a file that was given cannot be read as what it should be
    ├── CannotRunHere   this machine lacks something (an extra, a compiler, a CUDA build of torch)
    ├── WorkloadFailed  the user's own code raised
    └── ToolFailure     a run-time failure of memfit's own, or of a process that it started

Each message names the value, the place and the remedy; the command line turns the class into an exit code
and never shows a traceback. "No plan fits" and "out of memory" are results, not errors.
"""

from __future__ import annotations

from typing import ClassVar


class MemfitError(Exception):
    """Base of all errors that memfit raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(MemfitError):
    """What was asked for cannot be meant: an unknown name, a bad size, options that exclude each other."""

    exit_code = 2


class InputError(MemfitError):
    """An input cannot be read: a missing, broken or foreign file, with the line or key where it fails."""

    exit_code = 5


class CannotRunHere(MemfitError):
    """This machine lacks something that the request needs; the message says what and how to get it."""

    exit_code = 6


class WorkloadFailed(MemfitError):
    """The user's own code raised; the message has the type, the text, and the file and line."""


class ToolFailure(MemfitError):
    """A failure of memfit itself or of a process that it started."""
