"""Real ranks for tests: processes forked off a server that has PyTorch loaded, so that each costs little.

The server is a fresh process; nothing is forked off the one that runs the tests.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
DEADLINE_SECONDS = 90.0


@functools.cache
def _start_server() -> None:
    """Once. Python 3.11's server does not have this process's ``sys.path``, and passes over what it cannot
    import."""
    folder, before = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, sys.path)])
    _CONTEXT.set_forkserver_preload(["distributed.preloaded"])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How ranks ended: exit codes (negative: a signal), and what each function gave, by rank."""

    codes: tuple[int | None, ...]
    results: tuple[Any, ...]

    @property
    def ok(self) -> bool:
        return not any(self.codes)


def run_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> Ended:
    """``function(*arguments)`` as so many ranks; when one ends badly the others are killed, as a launcher
    does."""
    _start_server()
    port, processes, pipes = _free_port(), [], []
    for rank in range(ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(rank, ranks, port, theirs, function, arguments))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results = _results(processes, pipes)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    return Ended(codes=tuple(codes), results=tuple(results))


def expect(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> tuple[Any, ...]:
    """The results of ranks that must all end well."""
    ended = run_ranks(function, *arguments, ranks=ranks)
    failures = [result for result in ended.results if isinstance(result, Failure)]
    assert ended.ok, f"exit codes {ended.codes}\n" + "\n".join(failure.text for failure in failures)
    return ended.results


def until_done(function: Callable[..., Any], *arguments: Any, ranks: Sequence[int]) -> list[Ended]:
    """Runs again and again, with so many ranks each time, until all ranks end well; every attempt."""
    attempts = []
    for count in ranks:
        attempts.append(run_ranks(function, *arguments, ranks=count))
        if attempts[-1].ok:
            return attempts
    raise AssertionError(f"not done in {len(ranks)} attempts: {attempts}")


@dataclass(frozen=True)
class Failure:
    """What a rank's function raised."""

    text: str


def _rank(rank: int, ranks: int, port: int, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        # By value: multiprocessing would fetch tensors from their rank, which may have ended by then.
        pipe.send_bytes(pickle.dumps(function(*arguments)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(Failure(traceback.format_exc())))
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


def _results(processes: Sequence[Any], pipes: Sequence[Any]) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    open_pipes = dict(enumerate(pipes))
    running = set(range(len(processes)))
    while running:
        waited: list[Any] = [*open_pipes.values(), *(processes[n].sentinel for n in running)]
        ready = multiprocessing.connection.wait(waited, timeout=DEADLINE_SECONDS)
        if not ready:
            _kill(processes)
        for number in [n for n, pipe in open_pipes.items() if pipe in ready]:
            try:
                results[number] = pickle.loads(open_pipes[number].recv_bytes())
            except EOFError:
                open_pipes.pop(number)
        for number in [n for n in running if processes[n].sentinel in ready]:
            processes[number].join()
            running.discard(number)
            if processes[number].exitcode:
                _kill(processes)
    for number, pipe in open_pipes.items():  # what came between the last look and the end
        with contextlib.suppress(EOFError):
            while pipe.poll():
                results[number] = pickle.loads(pipe.recv_bytes())
    for pipe in pipes:
        pipe.close()
    return results


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
