"""What a ladder is: its rungs, each with what one more technique does to memory, time and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memfit.core.exactness import Exactness
from memfit.planning.figures import Settings

Kind = Literal["measured", "predicted"]
SCHEMA_VERSION = 1
PLAIN = "plain"
"""The name of the first rung, on which nothing is applied."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What training for real came to, with the techniques of a rung and without.

    Attributes:
        losses: per seed, the loss on batches that were not trained on, after the steps.
        plain_losses: the same without techniques, seed by seed.
        steps: optimizer steps of each run.
        step_seconds: the median step of these runs, on the CPU.
        scale: in which form the workload ran.
    """

    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    steps: int
    step_seconds: float
    scale: str

    @property
    def loss(self) -> float:
        """The mean over the seeds."""
        return _mean(self.losses)

    @property
    def difference(self) -> float:
        """By how much the loss is above the plain one: the mean of the differences seed by seed."""
        return _mean(self._differences)

    @property
    def difference_spread(self) -> float:
        """The standard deviation of these differences over the seeds."""
        return _deviation(self._differences)

    @property
    def seed_spread(self) -> float:
        """The standard deviation of the plain loss over the seeds: what chance alone does."""
        return _deviation(self.plain_losses)

    @property
    def within_spread(self) -> bool:
        """Whether the difference is no larger than what another seed makes."""
        return abs(self.difference) <= self.seed_spread

    @property
    def _differences(self) -> tuple[float, ...]:
        return tuple(own - plain for own, plain in zip(self.losses, self.plain_losses, strict=True))

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "loss": self.loss,
            "plain_loss": _mean(self.plain_losses),
            "difference": self.difference,
            "difference_spread": self.difference_spread,
            "seed_spread": self.seed_spread,
            "within_spread": self.within_spread,
            "losses": list(self.losses),
            "plain_losses": list(self.plain_losses),
            "steps": self.steps,
            "seeds": len(self.losses),
            "cpu_step_seconds": self.step_seconds,
            "scale": self.scale,
        }


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One technique on top of those before it.

    Attributes:
        name: the technique's, or ``"plain"``.
        settings: the technique as JSON; None for the plain step.
        exactness: of this technique on this model; None where it could not be told.
        peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes: of a step of the whole chain; None
            where the device has no such figure, or the rung is skipped.
        step_seconds: of the whole chain; None where it is not known, with why in ``step_seconds_reason``.
        step_seconds_kind: measured on the device, or predicted for it.
        operator_seconds: what the operators that were seen are predicted to take; None where nothing was.
        alone_reserved_bytes: the reserved peak with this technique alone; None where it was not tried.
        quality: None where no real step was run, with why in ``quality_reason``.
        skipped: why the technique is not part of the chain; None where it is.
    """

    name: str
    settings: Settings | None = None
    exactness: Exactness | None = None
    peak_requested_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_seconds: float | None = None
    step_seconds_kind: Kind | None = None
    step_seconds_reason: str | None = None
    operator_seconds: float | None = None
    alone_reserved_bytes: int | None = None
    quality: Quality | None = None
    quality_reason: str | None = None
    skipped: str | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The figure to compare rungs by: reserved bytes, or requested ones where nothing is reserved."""
        return self.peak_requested_bytes if self.peak_reserved_bytes is None else self.peak_reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Techniques applied one after another on one workload.

    Examples:
        >>> climbed = memfit.ladder("hf:gpt2,batch=8", gpu="a100-80gb")       # doctest: +SKIP
        >>> [(rung.name, rung.peak_reserved_bytes) for rung in climbed.rungs]  # doctest: +SKIP
    """

    workload: str
    device: str
    device_name: str
    engine: str
    engine_reason: str | None
    rungs: tuple[Rung, ...]
    notes: tuple[str, ...] = ()
    wall_seconds: float = 0.0

    @property
    def climbed(self) -> tuple[Rung, ...]:
        """The rungs that are part of the chain, the plain one first."""
        return tuple(rung for rung in self.rungs if rung.skipped is None)

    def before(self, rung: Rung) -> Rung | None:
        """The last rung of the chain below this one; None for the plain one."""
        place = next(number for number, other in enumerate(self.rungs) if other is rung)
        return next((other for other in reversed(self.rungs[:place]) if other.skipped is None), None)

    def changes(self, rung: Rung) -> dict[str, Any]:
        """``change_from_previous`` and ``change_from_plain`` of a rung, as JSON; None where there is none."""
        if rung.skipped is not None:
            return {"change_from_previous": None, "change_from_plain": None}
        previous = self.before(rung)
        plain = self.rungs[0] if previous is not None else None
        return {
            "change_from_previous": change(previous, rung),
            "change_from_plain": change(plain, rung),
        }

    def to_json(self) -> dict[str, Any]:
        """The one JSON object of ``memfit ladder --json``; bytes are integers, seconds floats."""
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload,
            "device": self.device,
            "device_name": self.device_name,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "rungs": [{**_rung_json(rung), **self.changes(rung)} for rung in self.rungs],
            "notes": list(self.notes),
            "wall_seconds": self.wall_seconds,
        }


def change(before: Rung | None, after: Rung) -> dict[str, Any] | None:
    """What changes from one rung to another; each figure is None where one of the two has none."""
    if before is None:
        return None
    peak, was = after.peak_bytes, before.peak_bytes
    losses = [None if rung.quality is None else rung.quality.loss for rung in (before, after)]
    same_kind = before.step_seconds_kind == after.step_seconds_kind
    return {
        "peak_requested_bytes": _less(after.peak_requested_bytes, before.peak_requested_bytes),
        "peak_allocated_bytes": _less(after.peak_allocated_bytes, before.peak_allocated_bytes),
        "peak_reserved_bytes": _less(after.peak_reserved_bytes, before.peak_reserved_bytes),
        "peak_percent": None if peak is None or not was else 100.0 * (peak / was - 1.0),
        "step_seconds": _less(after.step_seconds, before.step_seconds) if same_kind else None,
        "loss": _less(losses[1], losses[0]),
    }


def _less(after: Any, before: Any) -> Any:
    return None if after is None or before is None else after - before


def _rung_json(rung: Rung) -> dict[str, Any]:
    settings: Mapping[str, Any] = rung.settings or {}
    return {
        "name": rung.name,
        "settings": {key: value for key, value in settings.items() if key != "technique"},
        "exactness": rung.exactness,
        "skipped": rung.skipped is not None,
        "reason": rung.skipped,
        "peak_requested_bytes": rung.peak_requested_bytes,
        "peak_allocated_bytes": rung.peak_allocated_bytes,
        "peak_reserved_bytes": rung.peak_reserved_bytes,
        "alone_reserved_bytes": rung.alone_reserved_bytes,
        "step_seconds": rung.step_seconds,
        "step_seconds_kind": rung.step_seconds_kind,
        "step_seconds_reason": rung.step_seconds_reason,
        "operator_seconds": rung.operator_seconds,
        "quality": None if rung.quality is None else rung.quality.to_json(),
        "quality_reason": rung.quality_reason,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Of a sample; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    middle = _mean(values)
    return float((sum((value - middle) ** 2 for value in values) / (len(values) - 1)) ** 0.5)
