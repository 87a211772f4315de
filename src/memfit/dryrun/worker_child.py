"""What runs in the worker process and in its forks; see `memfit.dryrun.worker`.

The worker process stays single-threaded and never touches CUDA: a fork would not survive either.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from memfit.core.errors import MemfitError, ToolFailure
from memfit.dryrun.messages import receive, receive_with_socket, send
from memfit.dryrun.places import has_user_frame, is_out_of_memory, oom_value, workload_failed
from memfit.dryrun.preloading import Preload

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 1.0
_REAP_SECONDS = 2.0

_channel: socket.socket | None = None


def report_progress(data: Any) -> None:
    """Sends JSON-able ``data`` to the caller's ``on_progress``; does nothing outside of a worker's fork."""
    if _channel is not None:
        send(_channel, {"progress": data})


def main(descriptor: int, preload: Sequence[str]) -> NoReturn:
    """The worker process: loads modules, then forks as asked until its parent closes the socket or dies."""
    control = socket.socket(fileno=descriptor)
    parent = os.getppid()
    sys.argv = ["memfit"]
    loaded = Preload()
    try:
        loaded.load(preload)
    except MemfitError as problem:
        send(control, _error(problem))
        os._exit(1)
    gc.collect()
    gc.freeze()  # forks then neither scan nor copy what is shared
    send(control, {"ready": True, "capability": loaded.bound_to})
    children: set[int] = set()
    try:
        while os.getppid() == parent:
            if select.select([control], [], [], _PARENT_CHECK_SECONDS)[0]:
                _answer(control, children)
    except (EOFError, OSError):
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def _answer(control: socket.socket, children: set[int]) -> None:
    request, channel = receive_with_socket(control)
    if request["do"] == "reap":
        children.discard(request["pid"])
        send(control, {"status": _reap(request["pid"])})
        return
    assert channel is not None
    _flush()
    pid = os.fork()
    if pid == 0:
        control.close()
        _run(channel, request)
    channel.close()
    children.add(pid)
    send(control, {"pid": pid})


def _reap(pid: int) -> int:
    """Waits for a child that was told to end, and sees to it; its exit code, or minus a signal."""
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run(channel: socket.socket, request: Mapping[str, Any]) -> NoReturn:
    """The life of one fork. It ends without unwinding: autograd's threads may still be winding down."""
    global _channel
    _die_with_parent()
    faulthandler.enable()
    _channel = channel
    code = 0
    try:
        os.environ.update(request["environment"])
        if request["session"]:
            _serve(channel, request)
        else:
            send(channel, _outcome(lambda: _resolve(request["target"])(**request["arguments"])))
    except (EOFError, OSError):  # the caller has gone
        code = 1
    finally:
        _flush()
        os._exit(code)


def _serve(channel: socket.socket, request: Mapping[str, Any]) -> None:
    """A session: builds the object, then answers calls of its methods until the caller closes."""
    held: list[Any] = []

    def build() -> None:
        held.append(_resolve(request["target"])(**request["arguments"]))

    send(channel, _outcome(build))
    while True:
        message = receive(channel)

        def invoke(message: Mapping[str, Any] = message) -> Any:
            if not held:
                raise ToolFailure(
                    f"{request['target']} could not be built, so {message['method']}() cannot be called"
                )
            return getattr(held[0], message["method"])(**message["arguments"])

        send(channel, _outcome(invoke))


def _outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """The result of ``action`` as a message; running out of the GPU's memory is a result as well."""
    try:
        return {"result": action()}
    except MemfitError as problem:
        return _error(problem)
    except SystemExit as problem:
        return _error(workload_failed(problem, "the workload"))
    except BaseException as problem:
        if is_out_of_memory(problem):
            return {"result": {"oom": oom_value(problem)}}
        if _is_ours(problem):
            failure = ToolFailure(f"memfit failed: {type(problem).__name__}: {problem} (please report this)")
            return _error(failure, traceback.format_exc())
        return _error(workload_failed(problem, "the workload"))


def _is_ours(problem: BaseException) -> bool:
    """Whether memfit's own code raised, with none of the user's on the way."""
    frames = traceback.extract_tb(problem.__traceback__)
    return not has_user_frame(problem) and bool(frames) and f"{os.sep}memfit{os.sep}" in frames[-1].filename


def _error(problem: MemfitError, trace: str | None = None) -> dict[str, Any]:
    return {"error": {"kind": type(problem).__name__, "message": str(problem), "traceback": trace}}


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the code that ran
            continue
