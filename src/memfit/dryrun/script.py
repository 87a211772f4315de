"""A dry run of a script, as it is asked for: a process, or ranks of a job; and repeats where values steer."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from memfit.core.devices import GPU
from memfit.core.errors import UsageError
from memfit.dryrun.command import ScriptCommand, parse_command
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.launcher import GRACE_SECONDS, Launch, RunSettings, interruptions, launch_folders
from memfit.dryrun.ranks import SideBySide, run_ranks
from memfit.dryrun.repeats import with_other_answers
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.world import World

_SLOWER = 3  # times as long as the first run a repeat may take

Rank = int | Literal["all"]


def run_script(
    argv: Sequence[str],
    *,
    gpu: GPU,
    gpus: int | None = None,
    world_size: int | None = None,
    rank: Rank | None = None,
    nproc_per_node: int | None = None,
    steps: int | Literal["all"] = 3,
    trace: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    allow_writes: bool = False,
    timeout_seconds: float | None = None,
    output: Literal["stdout", "stderr"] = "stdout",
    repeats: int | None = None,
    real_host_values: bool = False,
) -> DryRunResult:
    """Run a script, unmodified, on the made-up ``gpu``.

    Args:
        argv: ``["train.py", "--lr", "1"]``, ``["python", "-m", "pkg"]``, ``["torchrun", "train.py"]`` …
        gpu: the GPU to make up.
        gpus: how many of them the script's one process sees.
        world_size: processes in the job that the script is part of; None: what torchrun or accelerate say.
        rank: which of them to run, or ``"all"`` that differ; None: 0 of ``world_size``, all of torchrun's.
        nproc_per_node: processes, and GPUs, on each machine.
        steps, trace, snapshot, allow_writes, timeout_seconds, output, real_host_values: see `RunSettings`.
        repeats: run again so often at most, with other answers where the script reads values that are not
            known; None: a few times, where they certainly matter.

    Returns:
        What was found. A script that fails, runs out of memory or is interrupted has a result too.

    Raises:
        UsageError, InputError: what was asked for cannot be run.
        CannotRunHere: this machine cannot make up a GPU.
        ToolFailure: the process was killed, or ended without a result.
    """
    command = parse_command(argv)
    world, chosen = job_of(command, gpus, world_size, rank, nproc_per_node)
    settings = RunSettings(
        gpus=gpus or 1,
        world=world,
        steps=steps,
        trace=None if trace is None else Path(trace).absolute(),
        snapshot=None if snapshot is None else Path(snapshot).absolute(),
        allow_writes=allow_writes,
        timeout_seconds=timeout_seconds,
        output=output,
        real_host_values=real_host_values,
    )
    return ScriptRun(command, gpu, settings).run(chosen, repeats=repeats)


def job_of(
    command: ScriptCommand,
    gpus: int | None,
    world_size: int | None,
    rank: Rank | None,
    nproc_per_node: int | None,
) -> tuple[World | None, Rank]:
    """The job that the script is part of (None: a process by itself), and which rank of it to run.

    Raises:
        UsageError: numbers that contradict each other.
    """
    told = command.processes
    if world_size is None and (told is None or told.count(gpus or 1) == 1):
        if rank not in (None, 0) or nproc_per_node not in (None, 1):
            given = f"rank {rank}" if rank is not None else f"{nproc_per_node} processes per node"
            raise UsageError(f"{given}: say how many ranks the job has (--world-size)")
        return None, 0
    size, per_node = world_size, nproc_per_node
    if told is not None and told.count(gpus or 1) > 1:
        size = size or told.count(gpus or 1)
        per_node = per_node or told.per_node or gpus
        if size != told.count(gpus or 1):
            raise UsageError(
                f"world size {size}: the command itself starts {told.count(gpus or 1)} processes"
            )
    assert size is not None
    world = World.of(size, per_node)
    if gpus is not None and gpus != world.per_node:
        raise UsageError(
            f"{gpus} GPUs: in a job of {size} ranks each has a GPU of its own, {world.per_node} on a "
            "machine; leave --gpus out"
        )
    chosen: Rank = rank if rank is not None else 0 if world_size is not None else "all"
    return world, chosen if chosen == "all" else world.check_rank(chosen)


@dataclass
class ScriptRun:
    """The processes of one dry run of a script."""

    command: ScriptCommand
    gpu: GPU
    settings: RunSettings
    _told: threading.Event | None = field(default=None, init=False)

    def run(self, rank: Rank, *, repeats: int | None) -> DryRunResult:
        """Run one rank, or all that differ; then the fullest again with other answers, where they matter."""
        world = self.settings.world
        if world is None:
            first = self._launch(self.settings)
        else:
            with interruptions() as self._told:
                first = self._run_job(world, rank, self.settings)
        limit = self.settings.timeout_seconds
        if self.settings.allow_writes:  # a repeat would write the user's files once more
            repeats = 0
        spare = None if limit is None else max(0.0, limit - first.wall_seconds)

        def run_again(answers: Mapping[str, str]) -> DryRunResult:
            return self._repeat(first, answers)

        return with_confidence(with_other_answers(first, run_again, most=repeats, seconds=spare))

    def _run_job(self, world: World, rank: Rank, settings: RunSettings) -> DryRunResult:
        """One rank, or all; beside it those that it waits for."""
        assert self._told is not None

        def launch(number: int) -> DryRunResult:
            own = replace(settings, rank=number, mail=ranks.mail)
            if number == rank:
                return self._launch(own)
            shown = rank == "all" and number == 0
            trace, snapshot = (
                _of_rank(path, number) if rank == "all" else None
                for path in (settings.trace, settings.snapshot)
            )
            own = replace(own, output=settings.output if shown else "none", trace=trace, snapshot=snapshot)
            return self._launch(own, keep=shown)

        with SideBySide(launch, self._told) as ranks:
            if rank != "all":
                return ranks.run(rank)
            return self._name_files(run_ranks(ranks.run, world))

    def _repeat(self, first: DryRunResult, answers: Mapping[str, str]) -> DryRunResult:
        longest = _SLOWER * first.wall_seconds + GRACE_SECONDS
        settings = replace(
            self.settings,
            trace=None,
            snapshot=None,
            output="none",
            answers=answers,
            timeout_seconds=min(longest, self.settings.timeout_seconds or math.inf),
        )
        if settings.world is None:
            return self._launch(settings, keep=False)
        with interruptions() as self._told:
            return self._run_job(settings.world, first.rank or 0, settings)

    def _launch(self, settings: RunSettings, *, keep: bool = True) -> DryRunResult:
        keep = keep and settings.output != "none"
        with launch_folders() as folders:
            try:
                result = Launch(self.command, self.gpu, settings, folders, self._told).run()
            finally:
                if not keep:
                    shutil.rmtree(folders.scratch, ignore_errors=True)
        return result if keep else replace(result, scratch_folder=None)

    def _name_files(self, result: DryRunResult) -> DryRunResult:
        """The fullest rank's trace and snapshot get the names that were asked for."""
        for path in (self.settings.trace, self.settings.snapshot):
            own = _of_rank(path, result.rank or 0)
            if path is not None and own is not None:
                with contextlib.suppress(FileNotFoundError):  # it came to no trace
                    own.replace(path)
        return result


def _of_rank(path: Path | None, rank: int) -> Path | None:
    """``run.rank3.memfit-trace``: the file of one rank among several."""
    return None if path is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
