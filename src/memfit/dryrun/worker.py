"""A process with torch loaded, from which every dry run is forked: torch's import (2 s) is paid once.

    with Worker(gpu) as worker:
        figures = worker.call("memfit.capture.measure:measure", workload=reference)
        with worker.session("memfit.planning.evaluate:Session", workload=reference) as session:
            session.call("evaluate", techniques=[...])

The worker process itself never touches CUDA. It holds one socket to its parent; each call or session gets a
socket of its own, whose other end the fork inherits, so user code may print what it likes. When the parent
ends, however it ends, the worker sees its socket close and takes its forks with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from memfit.core import errors
from memfit.core.devices import GPU
from memfit.core.errors import MemfitError, ToolFailure, WorkloadFailed
from memfit.dryrun.environment import Addresses, gpu_environment, gpu_settings
from memfit.dryrun.messages import receive, send

OnProgress = Callable[[Any], None]

_SOURCE = Path(__file__).resolve().parents[2]
_START = (
    "import sys; sys.path.append({source!r}); "
    "from memfit.dryrun.worker_child import main; main({fd}, {preload!r})"
)
_SECONDS_TO_END = 5.0
# Libraries that take seconds to import and do not touch CUDA on import.
_SLOW_LIBRARIES = ("transformers", "torchvision", "timm", "peft", "accelerate", "diffusers")


class Worker:
    """A long-lived process that forks a child for each call or session.

    Args:
        gpu: the made-up GPU of calls that name none; ``None`` starts a worker without any (CPU and meta
            tensors only).
        preload: modules to import before the first fork. A module that computes with CUDA on import must
            not be named here; one that asks for the capability may.

    The process starts at once, and is first waited for by the first call. Safe to use from several threads.
    """

    def __init__(self, gpu: GPU | None, *, preload: tuple[str, ...] = ("torch",)) -> None:
        self.gpu = gpu
        self._preload = preload
        self._lock = threading.Lock()
        self._ready = False
        self._capability: str | None = None  # the only one that the loaded modules are right for
        self._others: dict[str, Worker] = {}  # workers for other capabilities, where that matters
        ours, theirs = socket.socketpair()
        start = _START.format(source=str(_SOURCE), fd=theirs.fileno(), preload=preload)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                env=_environment(gpu),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what user code prints must not mix with our own output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours

    def call(
        self,
        function: str,
        *,
        gpu: GPU | None = None,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        **arguments: Any,
    ) -> Any:
        """Runs ``"package.module:function"`` in a fresh fork; arguments and result are JSON.

        Args:
            gpu: the made-up GPU of this call; default: the worker's.
            timeout_seconds: kills the fork when it takes longer.
            on_progress: gets what the function passes to `memfit.dryrun.worker_child.report_progress`.

        Raises:
            WorkloadFailed: the user's code raised, or ended the process; with its file and line.
            ToolFailure: the fork was killed, ran out of time, or memfit itself failed.
            MemfitError: another of memfit's errors, as raised in the fork.

        Running out of the made-up GPU's memory is no error: the result is then ``{"oom": {...}}``.
        """
        fork = self._fork(function, gpu, "bump", arguments, f"{function.rpartition(':')[2]}()")
        try:
            return fork.reply(timeout_seconds, on_progress)
        finally:
            fork.end()

    @contextlib.contextmanager
    def session(self, cls: str, *, gpu: GPU | None = None, **arguments: Any) -> Iterator[Session]:
        """Builds ``"package.module:Class"`` in one long-lived fork, for its methods to be called.

        The fork uses freed device addresses again, since a long search would run out of new ones.
        """
        fork = self._fork(cls, gpu, "firstfit", arguments, cls.rpartition(":")[2], session=True)
        try:
            opened = fork.reply(None, None)
            yield Session(fork, opened)
        finally:
            fork.end()

    def close(self) -> None:
        """Ends the process and everything that it forked. A closed worker cannot be used again."""
        for other in self._others.values():
            other.close()
        self._control.close()
        if not self._ready:  # it may still be loading torch, and has forked nothing yet
            self._process.kill()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fork(
        self,
        target: str,
        gpu: GPU | None,
        addresses: Addresses,
        arguments: Mapping[str, Any],
        what: str,
        session: bool = False,
    ) -> _Fork:
        device = gpu or self.gpu
        worker = self._right_for(device)
        request = {
            "do": "fork",
            "target": target,
            "arguments": arguments,
            "session": session,
            "environment": {} if device is None else gpu_settings(device, addresses=addresses),
        }
        ours, theirs = socket.socketpair()
        try:
            pid = worker._ask(request, theirs)["pid"]
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Fork(worker, ours, pid, what)

    def _right_for(self, gpu: GPU | None) -> Worker:
        """This worker, or one of its own kind where a loaded module has looked at another capability."""
        with self._lock:
            self._wait()
            if gpu is None or self._capability in (None, gpu_settings(gpu)["MEMFIT_GPU_CC"]):
                return self
            wanted = gpu_settings(gpu)["MEMFIT_GPU_CC"]
            if wanted not in self._others:
                self._others[wanted] = Worker(gpu, preload=self._preload)
            return self._others[wanted]

    def _ask(self, request: Mapping[str, Any], passed: socket.socket | None = None) -> dict[str, Any]:
        """One question to the worker process and its answer; waits for the process to be ready first."""
        with self._lock:
            self._wait()
            try:
                send(self._control, request, passed)
                answer: dict[str, Any] = receive(self._control)
            except (EOFError, OSError) as problem:
                raise self._gone() from problem
        _raise_error(answer)
        return answer

    def _wait(self) -> None:
        """Until the process has loaded its modules. The caller holds the lock."""
        if self._ready:
            return
        try:
            answer = receive(self._control)
        except (EOFError, OSError) as problem:
            raise self._gone() from problem
        _raise_error(answer)
        self._ready, self._capability = True, answer["capability"]

    def _gone(self) -> ToolFailure:
        code = self._process.poll()
        return ToolFailure(f"the dry run's worker process {'was closed' if code is None else _ending(code)}")


class Session:
    """An object that lives in a fork of the worker; its methods take and return JSON."""

    def __init__(self, fork: _Fork, opened: Any) -> None:
        self._fork = fork
        #: ``None``, or ``{"oom": {...}}`` when building the object already ran out of the made-up GPU's
        # memory.
        self.opened = opened

    def call(
        self,
        method: str,
        *,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
        **arguments: Any,
    ) -> Any:
        """Calls ``method`` with the arguments and returns its result; raises as `Worker.call` does."""
        self._fork.ask({"method": method, "arguments": arguments})
        return self._fork.reply(timeout_seconds, on_progress)


class _Fork:
    """The parent's end of one forked child."""

    def __init__(self, worker: Worker, channel: socket.socket, pid: int, what: str) -> None:
        self._worker, self._channel, self._pid, self._what = worker, channel, pid, what
        self._status: int | None = None

    def ask(self, message: Mapping[str, Any]) -> None:
        try:
            send(self._channel, message)
        except OSError:
            raise self._death() from None

    def reply(self, timeout_seconds: float | None, on_progress: OnProgress | None) -> Any:
        self._channel.settimeout(timeout_seconds)
        try:
            answer = receive(self._channel)
            while "progress" in answer:
                if on_progress is not None:
                    on_progress(answer["progress"])
                answer = receive(self._channel)
        except TimeoutError:
            self._kill()
            raise ToolFailure(f"{self._what} took longer than {timeout_seconds:g} s and was ended") from None
        except (EOFError, OSError):
            raise self._death() from None
        except (
            BaseException
        ):  # Ctrl-C, or the caller's progress function: a half-read channel is of no more use
            self._kill()
            raise
        _raise_error(answer)
        return answer["result"]

    def end(self) -> None:
        """Closes the channel, which ends the child, and lets the worker reap it."""
        self._channel.close()
        if self._status is None and self._worker._process.poll() is None:
            try:
                self._status = self._worker._ask({"do": "reap", "pid": self._pid})["status"]
            except ToolFailure:  # the worker has gone, and its forks with it
                self._status = -signal.SIGKILL

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id is still its own

    def _death(self) -> MemfitError:
        self.end()
        status = self._status if self._status is not None else -signal.SIGKILL
        if status >= 0:
            return WorkloadFailed(f"{self._what}: the code ended its process with exit code {status}")
        hint = "; the machine may be out of memory" if status == -signal.SIGKILL else ""
        return ToolFailure(f"{self._what}: the dry run's process {_ending(status)}{hint}")


def preload_for(spec: str | None) -> tuple[str, ...]:
    """The modules worth loading before forks for a workload's text; those with ``?`` may be missing."""
    kind, _, rest = (spec or "").partition(":")
    if kind == "hf":
        name = rest.partition(",")[0]
        return ("torch", "transformers", f"?transformers.models.{name}.modeling_{name}")
    if kind == "tv":
        return ("torch", "torchvision")
    if spec is None:  # made in this process, out of what is loaded here
        return ("torch", *(f"?{name}" for name in _SLOW_LIBRARIES if name in sys.modules))
    return (
        "torch",
        *(f"?{name}" for name in _SLOW_LIBRARIES if name in _imports_of(spec.rpartition(":")[0])),
    )


def _imports_of(file: str) -> set[str]:
    """The packages that a Python file imports by lines of its own; none when it cannot be read."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))


def _environment(gpu: GPU | None) -> dict[str, str]:
    base = dict(os.environ)
    base.pop("CUDA_VISIBLE_DEVICES", None)
    base.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a shortage of memory is a result here, and told as one
    base |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    if gpu is None:
        return base | {"CUDA_VISIBLE_DEVICES": ""}  # a real GPU is never touched
    return gpu_environment(gpu, base=base)


def _raise_error(answer: Mapping[str, Any]) -> None:
    error = answer.get("error")
    if error is None:
        return
    kind = getattr(errors, error["kind"], ToolFailure)
    problem: MemfitError = kind(error["message"])
    if error.get("traceback"):
        problem.add_note(error["traceback"])
    raise problem


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
