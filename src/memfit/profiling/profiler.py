"""`MemoryProfiler`: what a running program's memory is used for, at a cost that a training run can afford."""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core.errors import UsageError
from memfit.core.files import write_atomically
from memfit.profiling.devices import history_pickle, read_device, record_history
from memfit.profiling.profile import HISTORY_FILE, Profile
from memfit.profiling.records import StepEvents, to_trace
from memfit.profiling.tracker import StorageTracker
from memfit.profiling.usage import MemoryUsage, StepMemory

FREQUENCY = 10
FIRST_STEPS = 2
"""So many steps at the start are noted in detail in any case: the optimizer makes its state in the first."""
KEPT_STEPS = 6
"""Of so many detailed steps the events are kept: the first, the latest, and the one with the highest peak."""
DEVICES = ("cpu", "cuda")

P = ParamSpec("P")
R = TypeVar("R")


class MemoryProfiler:
    """Tells what memory is used for: by category, module, operator, line, phase and step.

    A *detailed* step notes every storage that is made and when it dies. Other steps cost next to nothing: an
    optimizer hook marks them, and the device's own counters are read. The first two steps are detailed, and
    then every ``profiling_frequency``-th.

    Args:
        profiling_frequency: every how many steps one is noted in detail; 1 is all of them.
        save_profiles: a folder; the profile is written there after each detailed step and at the end
            (``profile.json``, ``profile.memfit-trace``), each file whole or not at all.
        device: whose storages to note, ``"cpu"`` or ``"cuda"``; None: CUDA where the program uses it, else
            the CPU.
        model: to name its modules before it is called; without it, models are found when they are called.
        allocator_history: on CUDA, also have PyTorch record the allocator's own history in detailed steps,
            segments included; saved as ``allocator.pickle`` for ``memfit replay``.

    Steps are marked by `step`; without such calls, an optimizer's ``step()`` ends one.

    Examples:
        >>> import torch
        >>> profiler = MemoryProfiler()
        >>> profiler.start_profiling()
        >>> kept = torch.ones(1024, 256)
        >>> profile = profiler.stop_profiling()
        >>> profiler.get_memory_usage().peak_bytes
        1048576
    """

    def __init__(
        self,
        *,
        profiling_frequency: int = FREQUENCY,
        save_profiles: str | os.PathLike[str] | None = None,
        device: str | None = None,
        model: torch.nn.Module | None = None,
        allocator_history: bool = False,
    ) -> None:
        if (
            isinstance(profiling_frequency, bool)
            or not isinstance(profiling_frequency, int)
            or profiling_frequency < 1
        ):
            raise UsageError(
                f"profiling_frequency={profiling_frequency!r}: give a whole number of steps, 1 or more"
            )
        if device is not None and device.partition(":")[0] not in DEVICES:
            raise UsageError(f"device={device!r}: the profiler knows {' and '.join(DEVICES)}")
        self.profiling_frequency = profiling_frequency
        self.save_profiles = None if save_profiles is None else Path(save_profiles)
        self._device = None if device is None else device.partition(":")[0]
        self._model = model
        self._history = allocator_history
        self._tracker: StorageTracker | None = None
        self._steps: list[StepMemory] = []
        self._kept: list[StepEvents] = []
        self._history_pickle = b""
        self._hooks: list[Any] = []
        self._began = 0.0
        self._running = False
        self._marked_by_hand = False
        self._main_optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    @property
    def is_profiling(self) -> bool:
        """Whether it was started and not stopped yet."""
        return self._running

    def start_profiling(self) -> None:
        """Begin; after a stop, go on with the steps that follow.

        Raises:
            UsageError: it has begun already.
        """
        if self._running:
            raise UsageError("this profiler is running already: stop_profiling() comes first")
        if self._tracker is None:
            uses_cuda = torch.cuda.is_available() if self._device is None else self._device == "cuda"
            self._tracker = StorageTracker("cuda" if uses_cuda else "cpu")
            if self._model is not None:
                self._tracker.know(self._model)
                self._model = None
        if self._history and self._tracker.device_type != "cuda":
            raise UsageError("allocator_history=True: only CUDA's allocator has a history")
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._running, self._main_optimizer = True, None
        self._begin_step()

    def stop_profiling(self) -> Profile:
        """End, and give (and save, if asked) the profile.

        Raises:
            UsageError: it has not begun.
        """
        if not self._running:
            raise UsageError("this profiler is not running: start_profiling() comes first")
        self._running = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end_step(last=True)
        profile = self.profile()
        self._save(profile)
        return profile

    def step(self) -> None:
        """Mark the end of a step. After the first such call, optimizers no longer do.

        Raises:
            UsageError: the profiler is not running.
        """
        if not self._running:
            raise UsageError("this profiler is not running: start_profiling() comes before step()")
        self._marked_by_hand = True
        self._next_step()

    def get_memory_usage(self) -> MemoryUsage:
        """What is used now, and was at the peak of the detailed steps so far; prints well."""
        tracker = self._tracker
        detailed = [step for step in self._steps if step.detailed]
        if tracker is not None and tracker.step is not None and (tracker.step.events or not detailed):
            detailed = [*detailed, StepMemory.of(tracker.step, seconds=None, device=None)]
        device = "cpu" if tracker is None else tracker.device_type
        return MemoryUsage(
            device_type=device,
            step=max(detailed, key=lambda step: step.peak_bytes, default=None),
            steps_done=len(self._steps),
            steps_detailed=sum(step.detailed for step in self._steps),
            current_bytes=0 if tracker is None else tracker.live_bytes,
            device=read_device(device),
            frequency=self.profiling_frequency,
        )

    def profile(self) -> Profile:
        """The profile of the steps that have ended."""
        tracker = self._tracker
        device = "cpu" if tracker is None else tracker.device_type
        meta = {
            "source": "profiler",
            "name": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
            "torch": torch.__version__,
            "device": device,
            "steps": [step.number for step in self._kept],
        }
        return Profile(
            device_type=device,
            steps=tuple(self._steps),
            trace=to_trace(self._kept, meta),
            frequency=self.profiling_frequency,
            meta=meta,
        )

    def __enter__(self) -> Self:
        self.start_profiling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self.stop_profiling()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call of ``function`` is a step (or several, where it marks or makes them)."""

        @functools.wraps(function)
        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._running:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return profiled

    def _is_detailed(self, number: int) -> bool:
        return number < FIRST_STEPS or number % self.profiling_frequency == 0

    def _begin_step(self) -> None:
        assert self._tracker is not None
        if self._is_detailed(len(self._steps)):
            if self._history:
                record_history(True)
            self._tracker.begin(len(self._steps))
        self._began = time.perf_counter()

    def _next_step(self) -> None:
        self._end_step()
        self._begin_step()

    def _end_step(self, *, last: bool = False) -> None:
        assert self._tracker is not None
        seconds = time.perf_counter() - self._began
        device = read_device(self._tracker.device_type) if self._reads_device(last) else None
        if self._tracker.step is None:
            if not (last and self._steps):  # the rest after the last mark is no step of its own
                self._steps.append(StepMemory(number=len(self._steps), seconds=seconds, device=device))
            return
        step = self._tracker.end()
        pickled = self._end_history()
        if last and self._steps and not any(len(event) == 2 for event in step.events):
            return  # what came after the last mark only freed
        self._steps.append(StepMemory.of(step, seconds=seconds, device=device))
        self._keep(step)
        self._history_pickle = pickled
        if self.save_profiles is not None and not last:
            self._save(self.profile())

    def _end_history(self) -> bytes:
        """PyTorch's history of the step that ends, where it is to be saved."""
        if not self._history:
            return b""
        pickled = history_pickle() if self.save_profiles is not None else b""
        record_history(False)
        return pickled

    def _save(self, profile: Profile) -> None:
        if self.save_profiles is not None:
            profile.save(self.save_profiles)
            if self._history_pickle:
                write_atomically(self.save_profiles / HISTORY_FILE, self._history_pickle)

    def _reads_device(self, last: bool) -> bool:
        """The host's counters take longer to read than they are worth in every step."""
        assert self._tracker is not None
        return last or self._tracker.device_type == "cuda" or self._tracker.step is not None

    def _keep(self, step: StepEvents) -> None:
        """Keeps the events of the first step, the highest one and the latest ones."""
        self._kept.append(step)
        if len(self._kept) > KEPT_STEPS:
            highest = max(self._kept, key=lambda kept: kept.peak_bytes)
            spare = next(kept for kept in self._kept[1:] if kept is not highest)
            self._kept.remove(spare)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tracker = self._tracker
        if tracker is not None and tracker.step is not None:
            tracker.label_optimizer(optimizer, state=False)
            tracker.place.state = "optimizer"

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tracker = self._tracker
        if tracker is not None and tracker.step is not None:
            tracker.label_optimizer(optimizer, state=True)
            tracker.place.state = "other"
        if self._marked_by_hand or torch._C._current_graph_task_id() != -1:
            return  # in the backward pass, the step is not over
        main = None if self._main_optimizer is None else self._main_optimizer()
        if main is None:
            self._main_optimizer, main = weakref.ref(optimizer), optimizer
        if main is optimizer:  # the others belong to the same step
            self._next_step()
