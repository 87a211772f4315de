"""What watches a script while it runs on the made-up GPU: the operations, a few hooks, and the account
of it."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.core.units import format_bytes
from memfit.dryrun import frames
from memfit.dryrun.assumptions import true_values
from memfit.dryrun.confidence import NOT_COMPUTED, TAKEN_AS_EXPECTED
from memfit.dryrun.history import History, Observations, PhaseChange, Position, read_history
from memfit.dryrun.interception import intercept
from memfit.dryrun.labels import Labels, op_name
from memfit.dryrun.lazy_host import LazyHost
from memfit.dryrun.owners import Owners
from memfit.dryrun.questions import Questions
from memfit.dryrun.recording import MOST_EVENTS, Moment, Recording
from memfit.dryrun.result import OutOfMemory, ValueRead
from memfit.dryrun.shadow import MISSING
from memfit.dryrun.steps import StepCounter
from memfit.dryrun.unmodelled import Unmodelled

aten = torch.ops.aten

_UPLOADS = frozenset({aten._to_copy.default, aten.copy_.default})


class Probe:
    """Watches this process from `start` on.

    Args:
        steps: end the run after so many optimizer steps; None: never.
        end: ends the run; does not return.
        answers: by place, other answers to give than those that are expected (see `Questions`).
        real_host_values: compute large tensors of the host at once (see `LazyHost`).
    """

    def __init__(
        self,
        *,
        steps: int | None,
        end: Callable[[], None],
        answers: Mapping[str, str] | None = None,
        real_host_values: bool = True,
    ) -> None:
        self._process = os.getpid()
        self.recording = Recording(self.is_ours)
        self.labels = Labels()
        self.owners = Owners(self.recording.position)
        self.questions = Questions(answers)
        self.values = true_values(self.questions)
        self.host = None if real_host_values else LazyHost()
        self.steps = StepCounter(steps, before=self._before_step, after=self._after_step, end=end)
        self.labels.on_new_root = self.owners.note_model
        self.unmodelled = Unmodelled()
        self._phases: list[tuple[Moment, str]] = []
        self._step_ends: list[Moment] = []
        self._busiest = 0
        self._backwards = 0
        self._shortage: tuple[int, int, int] = (0, 0, 0)
        self._first_oom: OutOfMemory | None = None
        self._last_oom: OutOfMemory | None = None

    def is_ours(self) -> bool:
        """Whether this is the process that is watched, and not a fork of it."""
        return os.getpid() == self._process

    def start(self) -> None:
        """Watch from now on."""
        if self.host is not None:
            self.host.install()
        self.recording.install()
        self.labels.install()
        self.steps.install()
        self._watch_backward()
        torch.cuda._lazy_call(self._watch_shortage)
        intercept(self._run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation, with its label, its shadows and its shortage of memory."""
        self.labels.stamp(func)
        try:
            out = MISSING if self.host is None else self.host.call(func, args, kwargs)
            if out is MISSING:
                out = self.values.call(func, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.note_out_of_memory(error, func)
            raise
        if func in _UPLOADS:
            self._note_upload(args, out)
        else:
            self.unmodelled.see(func, args)
        return out

    def note_out_of_memory(self, error: BaseException, func: Any = None) -> None:
        """A shortage of memory that reached Python, with what was running."""
        self.owners.note_living()
        place = frames.current_place() if func is not None else frames.place_in_traceback(error)
        phase, last_func, module = self.labels.last
        running = func if func is not None else last_func
        asked, free, reserved = self._shortage
        self._last_oom = OutOfMemory(
            file=place.file if place else None,
            line=place.line if place else 0,
            function=place.function if place else "",
            op=op_name(running) if running is not None else "",
            module=module,
            phase=phase,
            asked_bytes=asked,
            free_bytes=free,
            reserved_bytes=reserved,
            caught=True,
            message=str(error).split("\n")[0],
        )
        self._first_oom = self._first_oom or self._last_oom

    def out_of_memory(self, *, ended_by: BaseException | None) -> OutOfMemory | None:
        """The shortage that ended the script, else the first that it caught, else None."""
        if ended_by is None or not is_shortage(ended_by):
            return self._first_oom
        if self._last_oom is None:
            self.note_out_of_memory(ended_by)
        assert self._last_oom is not None
        return replace(self._last_oom, caught=False)

    def history(self, device: int, meta: Mapping[str, Any]) -> History:
        """All allocator events of the run on a device, with what was noted about them."""
        now = self.recording.position(device)
        events = self.recording.events(device)
        recorded = collections.Counter(event["action"] for event in events)
        observed = Observations(
            start=Position(now.allocs - recorded["alloc"], now.frees - recorded["free_requested"]),
            marks=[mark for mark in self.owners.marks if mark.device == device],
            phases=[PhaseChange(position=_of(moment, device), phase=phase) for moment, phase in self._phases],
            step_ends=[_of(moment, device) for moment in self._step_ends],
        )
        return read_history(events, observed, is_user_file=frames.is_script_file, meta=meta)

    def value_reads(self) -> tuple[ValueRead, ...]:
        """The places where the script read what is not known."""
        return self.questions.reads()

    def not_modelled(self) -> tuple[str, ...]:
        """What the run met that the made-up GPU does not have."""
        notes = list(self.unmodelled.notes())
        if any(read.kind in ("size", "routing") for read in self.value_reads()):
            notes.append(TAKEN_AS_EXPECTED)
        if self.host is not None and self.host.count:
            which = f"{self.host.count} tensors of the host ({format_bytes(self.host.size_bytes)})"
            notes.append(f"{NOT_COMPUTED} {which}: nothing looked at them (--real-host-values computes them)")
        notes += self.unmodelled.refused()
        if max(map(len, self.recording.snapshot()["device_traces"])) >= MOST_EVENTS:
            notes.append(
                f"the beginning of the run in the trace: it holds the last {MOST_EVENTS} events (the peaks "
                "are whole)"
            )
        return tuple(notes)

    def note_missing(self, text: str) -> None:
        """The run met something that is not modelled."""
        self.unmodelled.note(text)

    def _note_upload(self, args: Any, out: Any) -> None:
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        if isinstance(out, torch.Tensor) and out.is_cuda and source.device.type == "cpu":
            self.owners.note("input", [out])

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.owners.note_optimizer(optimizer)
        self._change_phase("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.owners.note_optimizer(optimizer)
        self._change_phase("forward")
        self.labels.end_of_step()
        if self.steps.done > self._busiest:
            self._busiest = self.steps.done
            self._step_ends.append(self.recording.moment())

    def _change_phase(self, phase: str) -> None:
        if not self._backwards:
            self.labels.enter(phase)
        self._phases.append((self.recording.moment(), phase))

    def _watch_backward(self) -> None:
        """Note where each backward pass begins and ends (nested ones belong to the outermost)."""
        run = torch.autograd.graph._engine_run_backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = not self._backwards and self.is_ours()
            before = self.labels.phase
            if outermost:
                self._change_phase("backward")
            self._backwards += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._backwards -= 1
                if outermost:
                    self._change_phase("forward" if before in ("init", "backward") else before)

        torch.autograd.graph._engine_run_backward = watched
        setattr(torch.autograd, "_engine_run_backward", watched)  # noqa: B010

    def _watch_shortage(self) -> None:
        if not self.is_ours():
            return

        def shortage(device: int, asked: int, _total: int, free: int) -> None:
            reserved = torch._C._cuda_memoryStats(device)["reserved_bytes"]["all"]["current"]
            self._shortage = (asked, free, reserved)

        getattr(torch._C, "_cuda_attach_out_of_memory_observer")(shortage)  # noqa: B009


def is_shortage(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came from, says that the made-up GPU's memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or ("out of memory" in text and "CUDA" in text):
            return True
        error = error.__cause__ or error.__context__
    return False


def _of(moment: Moment, device: int) -> Position:
    return moment[device] if device < len(moment) else Position()
