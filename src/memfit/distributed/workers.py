"""Processes that are the ranks of a group, started and led by one that is none: a notebook, a plain script.

Each is a fresh interpreter (`memfit.distributed.worker`) that takes commands through an authenticated
connection of ``multiprocessing``, so no ``if __name__ == "__main__"`` is needed in the caller's script. A
worker that dies is seen at once; the others are then ended too, as their next collective would never return.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

import cloudpickle

from memfit.core.errors import MemfitError, ToolFailure

START_SECONDS = 120.0
END_SECONDS = 5.0


class Workers:
    """The processes of a group of ``count`` ranks.

    Raises:
        ToolFailure: a worker did not start.
    """

    def __init__(self, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self.closed = False
        self._end = weakref.finalize(self, _end_all, self._processes, self._connections)
        key = secrets.token_bytes(32)
        with Listener(authkey=key, backlog=count) as listener:
            start = {"address": listener.address, "key": key.hex(), "world": count, "port": _free_port()}
            for number in range(count):
                self._processes.append(_start({**start, "rank": number}))
            try:
                self._connections += self._accepted(listener, count)
            except BaseException:
                self._end()
                raise

    def _accepted(self, listener: Listener, count: int) -> list[Connection]:
        """The connections by rank; a worker that ends before it connects is said."""
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        sock: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
        while len(found) < count:
            if wait([sock], timeout=0.2):
                connection = listener.accept()
                found[int(connection.recv())] = connection
            self._check_alive()
            if time.monotonic() > deadline:
                raise ToolFailure(
                    f"{count - len(found)} of {count} workers did not start in {START_SECONDS:.0f} s"
                )
        return [found[number] for number in range(count)]

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes' numbers, by rank."""
        return tuple(process.pid for process in self._processes)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(memory, *arguments)`` in every worker, at once; the results by rank.

        ``memory`` is the worker's `RankMemory`. What the function raises is raised here; where several ranks
        raise, the first one's.

        Raises:
            ToolFailure: a worker died; all are ended then.
        """
        if self.closed:
            raise ToolFailure("the workers have ended; make a new DistributedMemory")
        message = cloudpickle.dumps((function, arguments))
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a dead one: found below, with its signal
                connection.send_bytes(message)
        answers = self._answers()
        for failed, value in answers:
            if failed:
                raise value
        return [value for _, value in answers]

    def _answers(self) -> list[tuple[bool, Any]]:
        waiting = dict(enumerate(self._connections))
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            numbers = {id(connection): number for number, connection in waiting.items()}
            for ready in wait(list(waiting.values()), timeout=0.5):
                number = numbers[id(ready)]
                try:
                    answers[number] = cloudpickle.loads(waiting[number].recv_bytes())
                except (EOFError, OSError):
                    self._processes[number].wait(timeout=END_SECONDS)
                    self._check_alive()
                del waiting[number]
        return [answers[number] for number in range(len(self._connections))]

    def _check_alive(self) -> None:
        for number, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                self.close()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                raise ToolFailure(
                    f"the worker of rank {number} (pid {process.pid}) {how}; its shards are lost and the "
                    "other workers were ended: make a new DistributedMemory"
                )

    def close(self) -> None:
        """Ends all workers: by word first, then by force."""
        self.closed = True
        self._end()


def _start(start: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit.distributed.worker"], stdin=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(start).encode())
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_all(processes: Sequence[subprocess.Popen[bytes]], connections: Sequence[Connection]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.close()  # a worker that waits for a command ends at once
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()) if connections else 0.0)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def as_error(error: BaseException) -> Exception:
    """An exception that can be sent: memfit's own as it is, any other with its class's name in the text."""
    if isinstance(error, MemfitError):
        return error
    return ToolFailure(f"{type(error).__name__}: {error}")
