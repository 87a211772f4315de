"""The largest batch size that a job can keep: whole steps on its worst batch, evaluation too, with a margin,
and everything as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, parse_bytes
from memfit.techniques.adaptive import training_step
from memfit.techniques.adaptive_restore import StepState, TrainingState
from memfit.techniques.adaptive_shortage import is_out_of_memory, release
from memfit.techniques.batch_size_meter import PeakMeter, device_of, limit_of

STEPS = 2
"""Full steps for each size: the optimizer's state is made in the first, so the second has the peak."""


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """One size that was run. ``peak_bytes`` is None where it ran out of memory."""

    batch_size: int
    peak_bytes: int | None
    fits: bool


@dataclass(frozen=True, kw_only=True)
class BatchSizeResult:
    """What `find_batch_size` found.

    Attributes:
        batch_size: the largest that fits within the limit less the margin; 0 where none does.
        peak_bytes: of its step or its evaluation, whichever is larger.
        limit_bytes: of the memory that may be used; the margin is kept free of it.
        margin: the share that is kept free.
        tried: all sizes that were run, in order.
        device: what they ran on.
    """

    batch_size: int
    peak_bytes: int | None
    limit_bytes: int
    margin: float
    tried: tuple[TriedSize, ...]
    device: str

    def __str__(self) -> str:
        if self.batch_size == 0:
            return f"no batch size fits {format_bytes(self.limit_bytes)} less {self.margin:.0%}"
        return (
            f"batch size {self.batch_size}: peak {format_bytes(self.peak_bytes or 0)} of "
            f"{format_bytes(self.limit_bytes)} on {self.device}, with {self.margin:.0%} kept free "
            f"({len(self.tried)} sizes run)"
        )


def find_batch_size(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, Any], Tensor],
    worst_batch: Callable[[int], Any],
    *,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    limit: int | str | None = None,
    margin: float = 0.05,
    start: int = 1,
    most: int = 65536,
    multiple_of: int = 1,
) -> BatchSizeResult:
    """The largest batch size whose training step and evaluation fit, found by running them.

    Each size runs ``STEPS`` whole steps (forward, backward, ``optimizer.step()``, so that the optimizer's
    state counts) and one evaluation. Sizes double until one does not fit, then are halved in on. Afterwards
    weights, buffers, gradients, optimizer state, modes and random states are to the bit as before.

    Args:
        worst_batch: size → the batch that needs most at that size (the longest texts), on the device.
        evaluate: ``(model, batch)``, run in evaluation mode without gradients; ``None``: ``loss``.
        limit: bytes, or text like ``"8GiB"``; ``None``: what the device has, or the host's memory that is
            free. On a GPU the peak is of reserved bytes, elsewhere of the bytes of live tensors.
        margin: the share of ``limit`` that stays free, for batches that fragment memory otherwise.
        start: the first size; must be a multiple of ``multiple_of``.
        most: no larger size is tried.
        multiple_of: sizes are multiples of this.

    Raises:
        UsageError: an impossible limit, margin or size.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(1000, 10)
        >>> found = find_batch_size(
        ...     model,
        ...     torch.optim.AdamW(model.parameters()),
        ...     lambda model, batch: model(batch).square().mean(),
        ...     lambda size: torch.zeros(size, 1000),
        ...     limit="1MiB",
        ... )
        >>> 100 < found.batch_size < 262
        True
    """
    _check(margin, start, most, multiple_of)
    device = device_of(model)
    limit_bytes = limit_of(device) if limit is None else parse_bytes(limit)
    search = _Search(
        model, optimizer, loss, worst_batch, evaluate or loss, int(limit_bytes * (1 - margin)), device
    )
    with as_it_was(model, optimizer):
        best = _largest(search.fits, start, most, multiple_of)
    peaks = {tried.batch_size: tried.peak_bytes for tried in search.tried}
    return BatchSizeResult(
        batch_size=best,
        peak_bytes=peaks.get(best),
        limit_bytes=limit_bytes,
        margin=margin,
        tried=tuple(search.tried),
        device=str(device),
    )


@dataclass
class _Search:
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    worst_batch: Callable[[int], Any]
    evaluate: Callable[[nn.Module, Any], Any]
    allowed_bytes: int
    device: torch.device

    def __post_init__(self) -> None:
        self.tried: list[TriedSize] = []

    def fits(self, size: int) -> bool:
        """Runs one size."""
        peak, error = self._peak(size)
        if error is not None:
            release(error)
        fits = peak is not None and peak <= self.allowed_bytes
        self.tried.append(TriedSize(batch_size=size, peak_bytes=peak, fits=fits))
        return fits

    def _peak(self, size: int) -> tuple[int | None, BaseException | None]:
        meter = PeakMeter(self.device, [self.model, self.optimizer], stop_at_bytes=2 * self.allowed_bytes)
        try:
            with meter:
                self._run(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None, error
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return meter.peak_bytes, None

    def _run(self, size: int) -> None:
        step = training_step(self.model, self.optimizer, self.loss)
        self.model.train()
        for _ in range(STEPS):
            step(self.worst_batch(size))
        self.model.eval()
        with torch.no_grad():
            self.evaluate(self.model, self.worst_batch(size))
        self.model.train()


def _largest(fits: Callable[[int], bool], start: int, most: int, unit: int) -> int:
    """The largest size that fits; 0 where ``start`` does not and no smaller one does either."""
    good, bad, size = 0, most + unit, start
    while size <= most:
        if not fits(size):
            bad = size
            break
        good, size = size, min(2 * size, most // unit * unit) if size < most // unit * unit else most + unit
    while bad - good > unit:
        middle = (good + bad) // 2 // unit * unit
        middle = middle if middle > good else good + unit
        if middle >= bad:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@contextlib.contextmanager
def as_it_was(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Whatever happens inside, the model and the optimizer are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    state = StepState(model, [optimizer])
    state.begin()
    training = TrainingState(optimizer, model)
    try:
        yield
    finally:
        with torch.no_grad():
            training.restore()
        state.restore()
        state.forget()
        for module, mode in modes:
            module.training = mode


def _check(margin: float, start: int, most: int, multiple_of: int) -> None:
    if not 0 <= margin < 1:
        raise UsageError(f"find_batch_size: margin must be at least 0 and below 1, not {margin!r}")
    for key, value in (("start", start), ("most", most), ("multiple_of", multiple_of)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"find_batch_size: {key} must be a whole number of at least 1, not {value!r}")
    if start % multiple_of or start > most:
        raise UsageError(
            f"find_batch_size: start must be a multiple of {multiple_of} up to {most}, not {start}"
        )
