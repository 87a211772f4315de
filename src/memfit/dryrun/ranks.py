"""Several ranks of one job, each run by itself: which ones differ, and the account of them together."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from memfit.core.errors import MemfitError
from memfit.dryrun.accounts import GroupShape, RankAccount
from memfit.dryrun.mail import note_gone, wanted_ranks
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.world import World

RUN_ALL_UP_TO = 8
"""A job of so many ranks is run whole."""
MOST_RUNS = 24
"""Of a larger one at most so many ranks are run."""

_POLL_SECONDS = 0.05

RunRank = Callable[[int], DryRunResult]


class SideBySide:
    """Runs ranks next to each other, each once: those that are asked for, and those that others wait for.

    Args:
        launch: runs one rank.
        told: set where everything is to end; set at the end.
    """

    def __init__(self, launch: RunRank, told: threading.Event) -> None:
        self.mail = Path(tempfile.mkdtemp(prefix="memfit-mail-"))
        self._launch, self._told = launch, told
        self._lock = threading.Lock()
        self._runs: dict[int, Future[DryRunResult]] = {}
        self._threads: list[threading.Thread] = []
        self._watcher = threading.Thread(target=self._watch, name="memfit-ranks", daemon=True)

    def run(self, rank: int) -> DryRunResult:
        """The result of a rank; of its one run, if it is running already."""
        with self._lock:
            first = rank not in self._runs
            future = self._runs.setdefault(rank, Future())
        if first:
            try:
                future.set_result(self._launch(rank))
            except BaseException as error:
                future.set_exception(error)
            finally:
                note_gone(self.mail, rank)
        return future.result()

    def __enter__(self) -> SideBySide:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._told.set()
        self._watcher.join()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self.mail, ignore_errors=True)

    def _watch(self) -> None:
        """Start the ranks that others wait for."""
        while not self._told.wait(_POLL_SECONDS):
            for rank in wanted_ranks(self.mail) - self._runs.keys():
                thread = threading.Thread(target=self._accompany, args=(rank,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _accompany(self, rank: int) -> None:
        with contextlib.suppress(MemfitError):  # whoever waits for it goes on without
            self.run(rank)


def run_ranks(run: RunRank, world: World) -> DryRunResult:
    """Run every rank of the job whose memory can differ, as many at once as there are processors.

    Args:
        run: runs one rank; asked again, it gives the same result.

    Returns:
        The result of the fullest rank (or of the first that failed), with the accounts of all.
    """
    begun = time.monotonic()
    few = world.size <= RUN_ALL_UP_TO
    with ThreadPoolExecutor(max_workers=min(world.size, os.cpu_count() or 1)) as pool:
        groups = () if few else run(0).groups  # they tell which ranks differ
        chosen = differing_ranks(groups, world)
        results = dict(zip(chosen, pool.map(run, chosen), strict=True))
    return combine(results, results[0].groups, world, seconds=time.monotonic() - begun)


def differing_ranks(groups: Sequence[GroupShape], world: World) -> list[int]:
    """The ranks to run, rank 0 first.

    In a job of a few all. In a larger one, along each group that rank 0 is in, its first and last members
    (the last shard of an uneven split is smaller), and every member where it sends messages, for the stages
    of a pipeline hold different layers; and the last rank of all.
    """
    if world.size <= RUN_ALL_UP_TO:
        return list(range(world.size))
    chosen = [0]
    for group in sorted(groups, key=lambda group: not group.sends):
        chosen += group.ranks if group.sends else (group.ranks[0], group.ranks[-1])
    chosen = list(dict.fromkeys([*chosen[: MOST_RUNS - 1], world.size - 1]))
    return sorted(chosen)


def combine(
    results: Mapping[int, DryRunResult], groups: Sequence[GroupShape], world: World, *, seconds: float
) -> DryRunResult:
    """One result of several ranks' own; ``groups`` are those of rank 0."""
    like = _likeness(sorted(results), groups, world)
    accounts = tuple(_account(rank, result, like[rank]) for rank, result in sorted(results.items()))
    top = max(results.values(), key=_weight)
    notes = dict.fromkeys(note for result in (top, *results.values()) for note in result.not_modelled)
    return replace(
        top,
        ranks=accounts,
        not_modelled=tuple(notes),
        wall_seconds=seconds,
        scratch_folder=next(filter(None, (result.scratch_folder for result in results.values())), None),
    )


def _weight(result: DryRunResult) -> tuple[bool, bool, int]:
    failed = result.exit_code != 0 and result.oom is None
    return failed, result.oom is not None, result.device_total_bytes


def _likeness(run: Sequence[int], groups: Sequence[GroupShape], world: World) -> dict[int, tuple[int, ...]]:
    """For each rank that was run the ranks that were not and are like it: at the same stage of each pipeline,
    and else the nearest before it."""
    stages = [_stage_of(group) for group in groups if group.sends]
    found: dict[int, list[int]] = {rank: [] for rank in run}
    members = set(run)
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank in run:
        by_place.setdefault(tuple(stage(rank) for stage in stages), []).append(rank)
    for rank in range(world.size):
        if rank not in members:
            alike = by_place.get(tuple(stage(rank) for stage in stages), list(run))
            before = [other for other in alike if other < rank]
            found[max(before, default=alike[0])].append(rank)
    return {rank: tuple(others) for rank, others in found.items()}


def _stage_of(group: GroupShape) -> Callable[[int], int]:
    """Where any rank is along a group of rank 0's, if the job's ranks are laid out as a mesh."""
    steps = {after - before for before, after in pairwise(group.ranks)}
    if len(steps) != 1:
        return lambda rank: 0
    step, size = steps.pop(), len(group.ranks)
    return lambda rank: rank // step % size


def _account(rank: int, result: DryRunResult, like: tuple[int, ...]) -> RankAccount:
    fullest = max(result.devices, key=lambda device: device.device_total_bytes, default=None)
    return RankAccount(
        rank=rank,
        device=fullest.index if fullest is not None else 0,
        like=like,
        fits=result.fits,
        ended=result.ended,
        exit_code=result.exit_code,
        problem=_problem(result),
        peak_requested_bytes=result.peak_requested_bytes,
        peak_allocated_bytes=result.peak_allocated_bytes,
        peak_reserved_bytes=result.peak_reserved_bytes,
        device_total_bytes=result.device_total_bytes,
        peak_by_category=result.peak_by_category,
    )


def _problem(result: DryRunResult) -> str | None:
    if result.oom is not None:
        return f"out of memory at {result.oom.where}"
    if result.error is not None:
        return f"{result.error.type}: {result.error.message}".splitlines()[0]
    return None if result.exit_code == 0 else f"ended with exit code {result.exit_code}"
