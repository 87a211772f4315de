"""Starts the ranks of a job and starts them again: PyTorch's elastic agent, with what it lacks.

The agent shares its store with the ranks by default; after a kill the store still has the addresses of the
dead, and the first restart fails (measured: 3 of 3 on gloo). ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives
each start a store of its own (4 of 4 resumed). Where restarts are used up, the job may go on with a rank
fewer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from memfit.core.errors import ToolFailure
from memfit.distributed.events import RECORDS_VARIABLE, read_events
from memfit.distributed.rank_entry import EXIT_OUT_OF_MEMORY
from memfit.distributed.rank_records import ROUND_VARIABLE, RankRecord, read_rank_records
from memfit.dryrun.command import ScriptCommand

Ended = Literal["done", "failed", "out_of_memory", "interrupted"]
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
STOP_SECONDS = 10
"""How long ranks have to end by themselves when another has failed, before they are killed."""
_PEER_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection refused",
    "gloo/transport",
    "DistNetworkError",
    "ncclRemoteError",
    "Broken pipe",
    "remote process exited",
    "socketPollConnect",
    "Timed out waiting",
)
"""What gloo and nccl say in a rank whose peer is gone."""
LOST_ELSEWHERE = "a rank on another machine was gone; memfit launch there tells why"


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How to start a job.

    Attributes:
        ranks: on this machine.
        least_ranks: where restarts are used up, go on with one rank fewer, down to so many.
        restarts: how often all ranks are started again when one fails.
        records: the folder for what ranks tell: memory, ends, events.
        nodes: machines in the job.
        rendezvous: ``host:port`` where the machines meet; this machine alone if not given.
        job: the job's name there, the same on all machines.
        output: where the ranks' stdout goes.
    """

    ranks: int
    least_ranks: int
    restarts: int
    records: Path
    nodes: int = 1
    rendezvous: str | None = None
    job: str | None = None
    output: Literal["stdout", "stderr"] = "stdout"


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a job went.

    Attributes:
        ended: how.
        world_size: ranks at the end.
        attempts: how often the ranks were started.
        records: each process of each attempt on this machine.
        events: what `FaultTolerance` told, oldest first.
        folder: of the records; `memfit monitor --source` reads it.
        wall_seconds: from the first start to the end.
    """

    ended: Ended
    world_size: int
    attempts: int
    records: tuple[RankRecord, ...]
    events: tuple[Mapping[str, Any], ...]
    folder: Path
    wall_seconds: float

    @property
    def failures(self) -> tuple[RankRecord, ...]:
        """The processes that ended on their own in another way than done, oldest first."""
        return tuple(r for r in self.records if r.outcome not in ("done", "stopped", "running"))

    @property
    def exit_code(self) -> int | None:
        """Of the last process that failed, as it was; 0 where the job was done."""
        if self.ended == "done":
            return 0
        return self.failures[-1].exit_code if self.failures else None

    def to_json(self) -> dict[str, Any]:
        """The one JSON object of ``memfit launch --json``."""
        return {
            "schema_version": 1,
            "ended": self.ended,
            "exit_code": self.exit_code,
            "world_size": self.world_size,
            "attempts": self.attempts,
            "restarts": self.attempts - 1,
            "failures": [record.to_json() for record in self.failures],
            "ranks": [record.to_json() for record in self.records],
            "events": [dict(event) for event in self.events],
            "records": str(self.folder),
            "wall_seconds": self.wall_seconds,
        }


class _Agent(LocalElasticAgent):
    """The elastic agent, that notes each failure: by itself it keeps the last one only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[dict[int, int]] = []

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.seen.append({rank: failure.exitcode for rank, failure in result.failures.items()})
        return result


def gpu_count() -> int:
    """The GPUs of this machine; 1 where there is none, for a rank on the CPU."""
    return max(1, torch.cuda.device_count() if torch.cuda.is_available() else 1)


def launch(script: ScriptCommand, settings: LaunchSettings) -> LaunchResult:
    """Run a script as ranks until it is done, or cannot be.

    Must be called from the main thread: the agent takes this process's signals, which are given back.

    Raises:
        ToolFailure: the ranks could not be started, or the machines did not meet.
    """
    began = time.monotonic()
    settings.records.mkdir(parents=True, exist_ok=True)
    exits: list[dict[int, int]] = []
    ranks = settings.ranks
    with _environment(settings, script), _stdout_to(settings.output), _signals():
        ended = _one_round(script, settings, ranks, exits)
        while ended == "failed" and ranks > settings.least_ranks:
            ranks -= 1
            ended = _one_round(script, settings, ranks, exits)
    records = _explained(
        [_completed(record, exits) for record in read_rank_records(settings.records)], settings.nodes
    )
    if ended == "failed" and any(
        r.outcome == "out_of_memory" and r.attempt == len(exits) - 1 for r in records
    ):
        ended = "out_of_memory"
    return LaunchResult(
        ended=ended,
        world_size=ranks * settings.nodes,
        attempts=max(1, len(exits) + (ended == "done")),
        records=records,
        events=tuple(read_events(settings.records)),
        folder=settings.records,
        wall_seconds=time.monotonic() - began,
    )


def _one_round(
    script: ScriptCommand, settings: LaunchSettings, ranks: int, exits: list[dict[int, int]]
) -> Ended:
    """Ranks of one number, with their restarts; the failures are added to ``exits``, one entry an attempt."""
    os.environ[ROUND_VARIABLE] = str(len(exits))
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=settings.rendezvous or "localhost:0",
        run_id=settings.job or uuid.uuid4().hex,
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        local_addr=None if settings.rendezvous else "localhost",
    )
    logs = settings.records / "agent"
    try:
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=_words(script, settings),
            max_restarts=settings.restarts,
            local_addr=None if settings.rendezvous else "localhost",
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=str(logs)), shutdown_timeout=STOP_SECONDS)
        try:
            result = agent.run()
        except SignalException:
            return "interrupted"
        finally:
            exits += agent.seen
            with contextlib.suppress(Exception):  # the machines have parted already
                handler.shutdown()
    except (RuntimeError, OSError, ValueError) as error:
        raise ToolFailure(f"the ranks could not be started: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    return "failed" if result.is_failed() else "done"


def _words(script: ScriptCommand, settings: LaunchSettings) -> tuple[str, ...]:
    entry = ("-u", "-m", "memfit.distributed.rank_entry", str(settings.records.absolute()))
    return (*entry, script.kind, script.target, *script.arguments)


def _completed(record: RankRecord, exits: list[dict[int, int]]) -> RankRecord:
    """The record with what the agent saw: it alone knows how a process ended that could not tell."""
    if record.outcome != "running" or record.attempt >= len(exits):
        return record
    code = exits[record.attempt].get(record.rank)
    if code is None or code == -signal.SIGTERM:
        return replace(record, outcome="stopped", exit_code=code)
    if code < 0:
        name = signal.Signals(-code).name
        return replace(record, outcome="killed", exit_code=code, error=f"killed by {name}")
    if code == EXIT_OUT_OF_MEMORY:
        return replace(record, outcome="out_of_memory", exit_code=code)
    return replace(
        record, outcome="hung", exit_code=code, error="ended without a word: by its watchdog, or os._exit"
    )


def _explained(records: Sequence[RankRecord], nodes: int = 1) -> tuple[RankRecord, ...]:
    """The records, in which a rank that failed only since another was gone counts as stopped.

    Where the cause is on another machine, the first of them says so.
    """
    causes = {
        r.attempt for r in records if r.outcome in ("killed", "hung", "out_of_memory") or _failed_itself(r)
    }
    found: list[RankRecord] = []
    for record in records:
        if record.outcome != "failed" or _failed_itself(record):
            found.append(record)
        elif record.attempt in causes:
            found.append(replace(record, outcome="stopped"))
        elif nodes > 1:
            causes.add(record.attempt)
            found.append(replace(record, error=LOST_ELSEWHERE, place=None))
        else:
            found.append(record)
    return tuple(found)


def _failed_itself(record: RankRecord) -> bool:
    return record.outcome == "failed" and not any(text in (record.error or "") for text in _PEER_LOST)


@contextlib.contextmanager
def _environment(settings: LaunchSettings, script: ScriptCommand) -> Iterator[None]:
    """What the agent and its ranks need in theirs; the agent's is this process's own."""
    before = dict(os.environ)
    os.environ[OWN_STORE_VARIABLE] = "1"
    os.environ[RECORDS_VARIABLE] = str(settings.records.absolute())
    if settings.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(script.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _stdout_to(output: Literal["stdout", "stderr"]) -> Iterator[None]:
    """The ranks have this process's descriptors: with ``stderr``, number 1 is led there meanwhile."""
    if output == "stdout":
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
