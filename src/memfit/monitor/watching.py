"""`memfit.watch()`: one line in a training script, and its memory is recorded, judged and seen by monitors.

A thread reads the counters that PyTorch keeps anyway, once a second unless told otherwise. Whatever goes
wrong in it is logged once and never reaches the training. A fork (a data loader's worker) is not watched and
touches no file of its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from memfit.core.errors import MemfitError, UsageError
from memfit.monitor.actions import Action, Log
from memfit.monitor.engine import Monitor, Status
from memfit.monitor.host import HostSource
from memfit.monitor.identity import Identity, identify, runs_folder
from memfit.monitor.nvml import NvmlSource
from memfit.monitor.rules import RULES, AlertRule, read_rules
from memfit.monitor.runs import RunWriter, forget_old_runs
from memfit.monitor.samples import AllocatorSample, Sample, Step, process_key
from memfit.monitor.torch_allocator import WALK_SHARE, TorchAllocatorSource

LOGGER = logging.getLogger("memfit.monitor")
SHORTEST_INTERVAL_SECONDS = 0.001
MOST_FAILURES = 20
"""After so many readings in a row have failed, the thread ends."""

Alerts = bool | str | os.PathLike[str] | Sequence[AlertRule]


class Watcher:
    """What `watch` gives: watches this process until `stop`, the end of the ``with`` block, or exit.

    Attributes:
        folder: of the run that records go to; None where none can be written.
        status: what was known at the last reading.
        peak_bytes: the most allocated bytes of one device that were seen, or that a step had.
    """

    def __init__(
        self,
        *,
        interval: float,
        folder: Path | None,
        rules: Sequence[AlertRule],
        actions: Sequence[Action],
        identity: Identity,
        walk_share: float,
    ) -> None:
        self.identity = identity
        self.interval = interval
        self.folder = folder
        self.status: Status | None = None
        self.peak_bytes = 0
        self.failures = 0
        self._allocator = TorchAllocatorSource(identity, walk_share=walk_share)
        self._sources = _OwnSources(self._allocator)
        self._monitor = Monitor([self._sources, NvmlSource()], rules=rules, actions=actions)
        self._writer = _try_writer(folder, identity, interval)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._owner = os.getpid()
        self._steps = _StepClock()
        self._thread: threading.Thread | None = None
        _ALL.add(self)

    def start(self) -> Watcher:
        """Begin to read in a thread."""
        if self._thread is None and self._owner == os.getpid():
            self._thread = threading.Thread(target=self._work, name="memfit-watch", daemon=True)
            self._thread.start()
        return self

    def step(self, *, reset_peak: bool = True) -> None:
        """Say that a training step has ended: its time, and the most that was allocated in it.

        Costs some 20 µs. PyTorch keeps one peak, so that the next step's can be known it is set back
        (``torch.cuda.reset_peak_memory_stats``); `peak_bytes` keeps the whole run's.

        Args:
            reset_peak: ``False`` leaves PyTorch's peak alone; what is noted is then the most of all steps
                so far.
        """
        if self._owner != os.getpid():
            return
        with self._guarded():
            index, held, peak = _levels(reset_peak)
            self._sources.add_step(self._steps.end(held, peak, key=self._key()), index)
            self.peak_bytes = self._sources.peak_bytes

    def sample(self) -> Status | None:
        """Read now; the last status where reading fails."""
        if self._owner == os.getpid():
            with self._guarded(), self._lock:
                self._read()
        return self.status

    def stop(self) -> None:
        """Read once more, close the records, end the thread. May be called twice."""
        if self._owner != os.getpid():
            return
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
        with self._guarded(), self._lock:
            if self._writer is not None:
                self._read()
                self._writer.close()
                self._writer = None
            self._monitor.close()
        _ALL.discard(self)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _key(self) -> str:
        who = self.identity
        return process_key(who.job, who.host, who.rank, who.pid)

    def _work(self) -> None:
        failures = 0
        while not self._wake.wait(self.interval):
            before = self.failures
            with self._guarded(), self._lock:
                self._read()
            failures = failures + 1 if self.failures > before else 0
            if failures >= MOST_FAILURES:
                LOGGER.warning("memfit.watch stops: reading failed %d times in a row", failures)
                return

    def _read(self) -> None:
        self.status = status = self._monitor.poll()
        self.peak_bytes = self._sources.peak_bytes
        own = [one for one in status.sample.allocators if one.pid == self._owner]
        if self._writer is not None:
            for step in status.sample.steps:
                self._writer.write_step(step)
            self._writer.write(
                Sample(time_seconds=time.time(), allocators=tuple(own), host=status.sample.host)
            )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Nothing that goes wrong here reaches the training; the first time is logged."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # that is the promise
            self.failures += 1
            level = logging.WARNING if self.failures == 1 else logging.DEBUG
            LOGGER.log(
                level, "memfit.watch: %s: %s", type(error).__name__, error, exc_info=level == logging.DEBUG
            )

    def _leave_in_fork(self) -> None:
        """In a forked child: forget the thread and the files, which are the parent's."""
        self._thread = None
        self._writer = None
        self._lock = threading.Lock()


def watch(
    *,
    interval: float = 1.0,
    folder: str | os.PathLike[str] | Literal[False] | None = None,
    alerts: Alerts = True,
    actions: Sequence[Action] | None = None,
    job: str | None = None,
    walk_share: float = WALK_SHARE,
) -> Watcher:
    """Watch the memory of this process from here on; `memfit monitor`, `export` and `dashboard` see it.

    Never synchronises CUDA, never initialises it, never raises once it runs. A second call while one is
    running gives that one. It stops by itself when the process ends.

    Args:
        interval: seconds between readings.
        folder: of the run, the same for all processes of a job; where monitors look by themselves unless
            given, and ``False`` for no records at all.
        alerts: rules to judge by (or a file of them); ``True`` for the shipped ones, ``False`` for none.
        actions: what alerts do; a line in the log ``memfit.monitor`` unless given.
        job: a name for the job; the script's unless given.
        walk_share: the most of the time that looking at single blocks may take (fragmentation, places);
            0 for never.

    Raises:
        UsageError: an interval or rule that cannot be meant.
        InputError: the file of rules cannot be read.

    Examples:
        >>> import memfit
        >>> with memfit.watch(folder=False) as watcher:
        ...     for _ in range(3):
        ...         watcher.step()
        >>> watcher.status.sample.host.rss_bytes > 0
        True
    """
    if (
        isinstance(interval, bool)
        or not isinstance(interval, int | float)
        or interval < SHORTEST_INTERVAL_SECONDS
    ):
        raise UsageError(f"watch(interval={interval!r}): give seconds, {SHORTEST_INTERVAL_SECONDS} or more")
    for running in _ALL:
        if running._owner == os.getpid():
            return running
    identity = identify(job)
    rules = _rules(alerts)
    place = None if folder is False else runs_folder() / identity.run if folder is None else Path(folder)
    if folder is None and place is not None:
        with contextlib.suppress(OSError):
            forget_old_runs(place.parent)
    chosen = (Log(),) if actions is None else tuple(actions)
    return Watcher(
        interval=float(interval),
        folder=place,
        rules=rules,
        actions=chosen,
        identity=identity,
        walk_share=walk_share,
    ).start()


def _rules(alerts: Alerts) -> Sequence[AlertRule]:
    if isinstance(alerts, bool):
        return RULES if alerts else ()
    if isinstance(alerts, str | os.PathLike):
        return read_rules(Path(alerts))
    return tuple(alerts)


def _try_writer(folder: Path | None, identity: Identity, interval: float) -> RunWriter | None:
    """The records' writer; None, with a line in the log, where that folder cannot be written."""
    if folder is None:
        return None
    try:
        return RunWriter(folder, identity, interval_seconds=interval)
    except (OSError, MemfitError) as error:
        LOGGER.warning("memfit.watch keeps no records: %s", error)
        return None


class _OwnSources:
    """This process: its allocator, its host memory and its steps, as one source."""

    name = "this process"

    def __init__(self, allocator: TorchAllocatorSource) -> None:
        self._allocator = allocator
        self._host = HostSource()
        self._steps: list[Step] = []
        self._last: tuple[Step, int] | None = None
        self._peaks: dict[int, int] = {}

    @property
    def peak_bytes(self) -> int:
        """The most of all devices."""
        return max(self._peaks.values(), default=0)

    def add_step(self, step: Step, index: int) -> None:
        self._note_peak(index, step.peak_bytes)
        self._last = step, index
        self._steps.append(step)

    def _note_peak(self, index: int, peak: int | None) -> None:
        if peak is not None:
            self._peaks[index] = max(self._peaks.get(index, 0), peak)

    def read(self, now_seconds: float) -> Sample:
        count = len(self._steps)
        steps, self._steps[:count] = tuple(self._steps[:count]), []
        found = self._allocator.read(now_seconds)
        return Sample(
            time_seconds=now_seconds,
            allocators=tuple(self._with_step(one) for one in found.allocators),
            host=self._host.read(now_seconds).host,
            steps=steps,
            notes=found.notes,
        )

    def close(self) -> None:
        self._allocator.close()

    def _with_step(self, one: AllocatorSample) -> AllocatorSample:
        self._note_peak(one.index, one.allocated_peak_bytes)
        one = replace(one, run_peak_bytes=self._peaks.get(one.index))
        if self._last is None:
            return one
        step, index = self._last
        one = replace(one, steps=step.number, step_seconds=step.seconds)
        if index != one.index:
            return one
        return replace(one, step_peak_bytes=step.peak_bytes, step_end_bytes=step.end_bytes)


class _StepClock:
    """Numbers and times of steps."""

    def __init__(self) -> None:
        self._number = 0
        self._last: float | None = None

    def end(self, held: int | None, peak: int | None, *, key: str) -> Step:
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._number, self._last = self._number + 1, now
        return Step(
            key=key,
            number=self._number,
            time_seconds=time.time(),
            seconds=seconds,
            peak_bytes=peak,
            end_bytes=held,
        )


def _levels(reset_peak: bool) -> tuple[int, int | None, int | None]:
    """The current CUDA device, its allocated bytes now, and their peak since it was last set back."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0, None, None
    held = cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    if reset_peak:
        cuda.reset_peak_memory_stats()
    return int(cuda.current_device()), int(held["current"]), int(held["peak"])


_ALL: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _stop_all() -> None:
    for watcher in list(_ALL):
        watcher.stop()


def _forked() -> None:
    for watcher in list(_ALL):
        watcher._leave_in_fork()
    _ALL.clear()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
