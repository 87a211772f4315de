"""True values on the made-up GPU while a step is built and run: else zeros would steer the model's Python."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from memfit.capture import step as step_module
from memfit.dryrun.assumptions import true_values as make_true_values
from memfit.dryrun.confidence import TAKEN_AS_EXPECTED
from memfit.dryrun.devices import estimates
from memfit.dryrun.interception import intercepting
from memfit.dryrun.places import is_user_file
from memfit.dryrun.questions import Questions
from memfit.dryrun.unmodelled import Unmodelled

Reads = Counter[tuple[str, int, str, str, str]]


def on_made_up_gpu() -> bool:
    """Whether this process's ``cuda`` device is memfit's made-up one."""
    return "MEMFIT_GPU_CC" in os.environ


class Uncertain:
    """What `true_values` yields: the reads of values that are not known, and what was not modelled."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.questions = Questions(answers)
        self.unmodelled = Unmodelled()

    def to_json(self) -> dict[str, Any]:
        """``value_reads``, ``not_modelled`` and ``estimates`` of `memfit.dryrun.result.DryRunResult`."""
        reads = self.questions.reads()
        sizes = [TAKEN_AS_EXPECTED] if any(read.kind in ("size", "routing") for read in reads) else []
        return {
            "value_reads": [asdict(read) for read in reads],
            "not_modelled": [*self.unmodelled.notes(), *sizes, *self.unmodelled.refused()],
            "estimates": estimates(),
        }


@contextmanager
def true_values(answers: Mapping[str, str] | None = None) -> Iterator[Uncertain]:
    """Small tensors keep their values; yields the account of what is not known.

    Does nothing but on the made-up GPU. Must be entered before the step is built, and outside of other
    dispatch modes.

    Args:
        answers: by place, other answers to give than the expected ones (see `memfit.dryrun.questions`).
    """
    uncertain = Uncertain(answers or {})
    if not on_made_up_gpu():
        yield uncertain
        return
    values = make_true_values(uncertain.questions)

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        uncertain.unmodelled.see(func, args)
        return values.call(func, args, kwargs)

    # Below PyTorch's modes: under a mode of ours autograd would add gradients out of place.
    with intercepting(run):
        yield uncertain


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
