"""Keeps what C code prints away from standard output, where JSON may be expected."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def standard_output_aside() -> Iterator[None]:
    """What is written to file descriptor 1 meanwhile goes nowhere. Nothing happens where there is none."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output to protect
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # what C has buffered belongs to this time
        os.dup2(kept, 1)
        os.close(kept)
