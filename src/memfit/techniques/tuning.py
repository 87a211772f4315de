"""A small search, on the device that is there, over what only measuring finds: which implementation of the
optimizer, how many micro-batches, which batch size, how many loader processes.

One of them at a time, each in turn with the others as found so far. All values of one are run in turns,
twice, so that a machine that grows slower does so for all; what is present stays unless another is clearly
faster. In the end the choice and the plain settings run in turns once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.techniques.adaptive import training_step
from memfit.techniques.adaptive_shortage import is_out_of_memory, release
from memfit.techniques.base import undo
from memfit.techniques.batch_size import as_it_was
from memfit.techniques.batch_size_meter import device_of
from memfit.techniques.micro_batching import why_approximate
from memfit.techniques.optimizer_implementation import IMPLEMENTATIONS, OptimizerImplementation
from memfit.techniques.tuning_result import TunedSettings, TuningMeasurement, TuningResult, faster

WARM_UP, STEPS, ROUNDS = 2, 3, 2
"""Steps that are not timed (more with loader processes, which start meanwhile), steps that are, and how often
each setting is run."""

Loss = Callable[[nn.Module, Any], Tensor]
Loader = Callable[[int, int], Iterable[Any]]


def tune(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    loader: Loader,
    *,
    batch_size: int,
    batch_sizes: Sequence[int] = (),
    micro_batches: Sequence[int] = (2, 4),
    implementations: Sequence[str] = IMPLEMENTATIONS,
    workers: Sequence[int] = (),
    seconds: float = 30.0,
    least_gain: float = 0.03,
    clock: Callable[[], float] = time.perf_counter,
) -> TuningResult:
    """Runs whole training steps with other settings, and says which are the fastest by sample.

    Afterwards weights, buffers, gradients, optimizer state, modes and random states are to the bit as before;
    `TuningResult.apply` puts the choice in force. Settings that run out of memory, or that the optimizer does
    not have, are rows with their reason.

    Args:
        loss: ``(model, batch)`` → a mean over the batch's samples or tokens.
        loader: ``(batch_size, workers)`` → an iterable of batches on the model's device; called again when
            that ends. ``lambda size, workers: [batch_of(size)]`` leaves loading out.
        batch_size: of one optimizer step, as it is now.
        batch_sizes: others to try, such as multiples of 8. Another size is another training.
        micro_batches: into how many pieces to cut the batch, beside 1: the same effective batch.
        implementations: of the optimizer: ``"fused"``, ``"foreach"``, ``"for-loop"``.
        workers: numbers of loader processes to try, beside 0.
        seconds: no new setting is begun when it would be over by then. The plain one always runs.
        least_gain: the share by which another setting must be faster to be taken.
        clock: gives seconds.

    Raises:
        UsageError: a setting that cannot be, or several ranks, which would choose apart.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(64, 8)
        >>> tuned = tune(
        ...     model,
        ...     torch.optim.AdamW(model.parameters()),
        ...     lambda model, batch: model(batch).square().mean(),
        ...     lambda size, workers: [torch.ones(size, 64)],
        ...     batch_size=16,
        ...     seconds=5.0,
        ... )
        >>> tuned.best.batch_size, tuned.speedup >= 1.0
        (16, True)
    """
    _check(batch_size, batch_sizes, micro_batches, implementations, workers, seconds, least_gain)
    began = clock()
    plain = TunedSettings(batch_size=batch_size)
    run = _Tuning(model, optimizer, loss, loader, clock, began + seconds)
    knobs: tuple[tuple[str, Sequence[Any]], ...] = (
        ("implementation", implementations),
        ("micro_batches", micro_batches),
        ("batch_size", batch_sizes),
        ("workers", workers),
    )
    with as_it_was(model, optimizer):
        best, left_out = run.search(plain, knobs, least_gain)
        last = run.compared(plain, best)
        best = faster(last[0], last[1:], least_gain).settings
    return TuningResult(
        best=best,
        plain=plain,
        measurements=tuple(run.rows.values()),
        compared=last,
        left_out=tuple(left_out),
        device=str(device_of(model)),
        seconds=clock() - began,
        notes=tuple(_notes(model, plain, best)),
    )


@dataclass
class _Tuning:
    """The steps that are run, and what they took."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    loader: Loader
    clock: Callable[[], float]
    end: float
    rows: dict[TunedSettings, TuningMeasurement] = field(default_factory=dict)
    longest: float = 0.0

    def search(
        self, plain: TunedSettings, knobs: Iterable[tuple[str, Sequence[Any]]], least_gain: float
    ) -> tuple[TunedSettings, list[TunedSettings]]:
        """The fastest settings found, one knob after another, and those that time did not reach."""
        self.measure(plain)
        if self.rows[plain].failed is not None:
            raise UsageError(f"tune: the plain step cannot run: {self.rows[plain].failed}")
        best = plain
        left_out: list[TunedSettings] = []
        for knob, values in knobs:
            settings = [replace(best, **{knob: value}) for value in values]
            others = [s for s in dict.fromkeys(settings) if s != best and s.micro_batches <= s.batch_size]
            left_out += self.in_turns(best, others)
            rows = [self.rows[s] for s in others if s in self.rows]
            best = faster(self.rows[best], rows, least_gain).settings
        return best, left_out

    def in_turns(self, present: TunedSettings, others: Sequence[TunedSettings]) -> list[TunedSettings]:
        """Runs the present settings and the others, in turns; gives back those that time did not reach."""
        for _ in range(ROUNDS if others else 0):
            for settings in (present, *others):
                row = self.rows.get(settings)
                if (row is None or row.failed is None) and self.clock() + self.longest <= self.end:
                    self.measure(settings)
        return [settings for settings in others if settings not in self.rows]

    def compared(self, plain: TunedSettings, best: TunedSettings) -> tuple[TuningMeasurement, ...]:
        """Both run again in turns, by themselves: the machine may be another than at the beginning. What is
        known of them where there is no time left."""
        known = self.rows
        if best == plain or self.clock() + 2 * ROUNDS * self.longest > self.end:
            return tuple(known[settings] for settings in dict.fromkeys((plain, best)))
        self.rows = {}
        for settings in (plain, best) * ROUNDS:
            self.measure(settings)
        again, self.rows = self.rows, known
        failed = [row for row in again.values() if row.failed is not None]
        return (again[plain],) if failed else tuple(again.values())

    def measure(self, settings: TunedSettings) -> None:
        """Runs steps with ``settings``, and adds their times to what is known of them."""
        began = self.clock()
        known = self.rows.get(settings, TuningMeasurement(settings=settings))
        try:
            times = self._times(settings)
            self.rows[settings] = replace(known, step_seconds=(*known.step_seconds, *times))
        except UsageError as refusal:
            self.rows[settings] = replace(known, failed=str(refusal))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            self.rows[settings] = replace(known, step_seconds=(), failed="out of memory")
        self.longest = max(self.longest, self.clock() - began)

    def _times(self, settings: TunedSettings) -> list[float]:
        if settings.implementation is None:
            return self._steps(settings)
        technique = OptimizerImplementation(implementation=settings.implementation)  # type: ignore[arg-type]
        technique.apply(self.model, self.optimizer)
        try:
            return self._steps(settings)
        finally:
            undo(self.model)

    def _steps(self, settings: TunedSettings) -> list[float]:
        step = training_step(self.model, self.optimizer, self.loss)
        self.model.train()
        batches = self._batches(settings)
        times = []
        try:
            for number in range(WARM_UP + settings.workers + STEPS):
                began = self.clock()
                step(next(batches), micro_batches=settings.micro_batches)
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                if number >= WARM_UP + settings.workers:
                    times.append(self.clock() - began)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            batches.close()
        return times

    def _batches(self, settings: TunedSettings) -> Generator[Any, None, None]:
        while True:
            empty = True
            for batch in self.loader(settings.batch_size, settings.workers):
                empty = False
                yield batch
            if empty:
                raise UsageError(f"tune: the loader gave no batch ({settings})")


def _notes(model: nn.Module, plain: TunedSettings, best: TunedSettings) -> Iterator[str]:
    if best.batch_size != plain.batch_size:
        yield f"A batch of {best.batch_size} in place of {plain.batch_size} is another training."
    if best.micro_batches > 1 and (reason := why_approximate(model)) is not None:
        yield f"Micro-batches change results: {reason}."


def _check(
    batch_size: int,
    batch_sizes: Sequence[int],
    micro_batches: Sequence[int],
    implementations: Sequence[str],
    workers: Sequence[int],
    seconds: float,
    least_gain: float,
) -> None:
    numbers = (
        ("batch_size", (batch_size, *batch_sizes), 1),
        ("micro_batches", tuple(micro_batches), 1),
        ("workers", tuple(workers), 0),
    )
    for key, values, least in numbers:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"tune: {key} must be whole numbers of at least {least}, not {value!r}")
    for name in implementations:
        OptimizerImplementation(implementation=name)  # type: ignore[arg-type]
    if not seconds > 0:
        raise UsageError(f"tune: seconds must be above 0, not {seconds!r}")
    if not 0 <= least_gain < 1:
        raise UsageError(f"tune: least_gain must be at least 0 and below 1, not {least_gain!r}")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            "tune: several ranks would choose apart; tune in one process, and give all its choice"
        )
