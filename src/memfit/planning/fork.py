"""Runs a function in a fork of this process and takes its JSON result: each plan meets the same, new state.

A process that has built a model on the made-up GPU, and run nothing, can be forked: there is no driver behind
it, the allocator's whole state is memory of the process, and autograd has no threads yet. So a plan tried in
a fork reserves to the byte what it reserves in a process of its own, without building the model anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from memfit.core import errors
from memfit.core.errors import MemfitError, ToolFailure
from memfit.dryrun.places import workload_failed


def in_fork(function: Callable[[], Any]) -> Any:
    """The JSON-able result of ``function``, run in a fork of this process; here where there is no fork.

    Raises what the function raised, as an error of memfit's: WorkloadFailed for the workload's own.
    """
    return begun_in_fork(function)()


def begun_in_fork(function: Callable[[], Any]) -> Callable[[], Any]:
    """Starts ``function`` as `in_fork` does; what is returned waits for its result, and is to be called."""
    if not hasattr(os, "fork"):
        return function
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(writing, function)
    os.close(writing)
    return lambda: _result_of(child, reading)


def _result_of(child: int, reading: int) -> Any:
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not text:
        raise ToolFailure(f"a plan's process ended with status {status} and said nothing")
    answer = json.loads(text)
    if "error" in answer:
        raise getattr(errors, answer["error"], ToolFailure)(answer["message"])
    return answer["result"]


def _answer(writing: int, function: Callable[[], Any]) -> None:
    """The child's life: ends without unwinding, as autograd's threads may still be winding down."""
    code = 1
    try:
        answer: dict[str, Any]
        try:
            answer = {"result": function()}
        except MemfitError as problem:
            answer = {"error": type(problem).__name__, "message": str(problem)}
        except Exception as problem:
            failed = workload_failed(problem, "the workload")
            answer = {"error": type(failed).__name__, "message": str(failed)}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)
