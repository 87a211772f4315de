"""True values on the made-up GPU while a step is built and run: else zeros would steer the model's Python."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.capture import step as step_module
from memfit.dryrun.assumptions import true_values as make_true_values
from memfit.dryrun.interception import intercepting
from memfit.dryrun.places import is_user_file
from memfit.dryrun.questions import EXPECTED, Kind, Question

Reads = Counter[tuple[str, int, str, str, str]]


def on_made_up_gpu() -> bool:
    """Whether this process's ``cuda`` device is memfit's made-up one."""
    return "MEMFIT_GPU_CC" in os.environ


@contextmanager
def true_values() -> Iterator[Reads]:
    """Small tensors keep their values; yields the reads of values that are not known, with file, line,
    function, op, answer.

    Does nothing but on the made-up GPU. Must be entered before the step is built, and outside of other
    dispatch modes.
    """
    reads: Reads = Counter()
    if not on_made_up_gpu():
        yield reads
        return
    values = make_true_values(_Listed(reads))
    # Below PyTorch's modes: under a mode of ours autograd would add gradients out of place.
    with intercepting(values.call):
        yield reads


class _Listed:
    """Questions that always get the expected answer, each answer counted in ``reads``."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def ask(self, op: str, kind: Kind) -> Question:
        return _Counted((*read_place(), op), kind, self._reads)


class _Counted(Question):
    """One question of `_Listed`."""

    def __init__(self, place: tuple[str, int, str, str], kind: Kind, reads: Reads) -> None:
        super().__init__("", kind, EXPECTED)
        self._place = place
        self._reads = reads

    def told(self, answer: str) -> None:
        self._reads[(*self._place, answer)] += 1


def reads_to_json(reads: Reads) -> list[dict[str, Any]]:
    """The reads with the keys of `memfit.dryrun.result.ValueRead`."""
    keys = ("file", "line", "function", "op", "answer")
    return [{**dict(zip(keys, place, strict=True)), "count": count} for place, count in reads.items()]


def read_place() -> tuple[str, int, str]:
    """The innermost frame of the user's code, or else of a library other than torch; below the step's own."""
    frame: Any = sys._getframe(2)
    library = ("", 0, "")
    while frame is not None and frame.f_code.co_filename != step_module.__file__:
        file = frame.f_code.co_filename
        here = (file, frame.f_lineno, frame.f_code.co_name)
        if is_user_file(file):
            return here
        if not library[0] and not any(f"{os.sep}{name}{os.sep}" in file for name in ("torch", "memfit")):
            library = here
        frame = frame.f_back
    return library
