"""What tuning measured and what it chose: values, the choice, and their text and JSON forms. No torch."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.core.files import write_atomically
from memfit.core.units import format_seconds

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """How steps run: what `tune` varies.

    Attributes:
        batch_size: samples of one optimizer step.
        micro_batches: pieces that the batch is cut into.
        implementation: the optimizer's; None: as the optimizer was made.
        workers: processes that load batches.
    """

    batch_size: int
    micro_batches: int = 1
    implementation: str | None = None
    workers: int = 0

    def __str__(self) -> str:
        optimizer = self.implementation or "as it is"
        return (
            f"batch {self.batch_size}, {self.micro_batches} micro-batches, optimizer {optimizer}, "
            f"{self.workers} workers"
        )


@dataclass(frozen=True, kw_only=True)
class TuningMeasurement:
    """Steps that were run with one setting. ``failed`` says why none could be."""

    settings: TunedSettings
    step_seconds: tuple[float, ...] = ()
    failed: str | None = None

    @property
    def seconds_per_sample(self) -> float | None:
        """The median step's; None where none ran."""
        if not self.step_seconds:
            return None
        return statistics.median(self.step_seconds) / self.settings.batch_size


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What `memfit.tune` found.

    Attributes:
        best: the settings that it ended with.
        plain: the settings that it began with.
        measurements: what was run in the search, in order; one entry for each setting.
        compared: the plain settings, and the best where they are others, as they ran in turns in the end.
        left_out: settings that the budget of seconds did not reach.
        device: where the steps ran.
        seconds: how long it all took.
        notes: what the choice changes beside the time.
    """

    best: TunedSettings
    plain: TunedSettings
    measurements: tuple[TuningMeasurement, ...]
    compared: tuple[TuningMeasurement, ...]
    left_out: tuple[TunedSettings, ...]
    device: str
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """How many times as many samples a second as with the plain settings, run in turns with them."""
        times = {row.settings: row.seconds_per_sample for row in self.compared}
        plain, best = times[self.plain], times[self.best]
        assert plain is not None and best is not None, "both were run"
        return plain / best

    def apply(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Applies the techniques among the best settings: the optimizer's implementation, and micro-batches.

        Micro-batches are for loops that ask for them (`memfit.training_step`,
        ``MicroBatching.split``); batch size and workers are the loader's.
        """
        from memfit.techniques.micro_batching import MicroBatching
        from memfit.techniques.optimizer_implementation import OptimizerImplementation

        if self.best.implementation is not None:
            technique = OptimizerImplementation(implementation=self.best.implementation)  # type: ignore[arg-type]
            technique.apply(model, optimizer)
        if self.best.micro_batches > 1:
            MicroBatching(micro_batches=self.best.micro_batches).apply(model, optimizer)
        return model, optimizer

    def to_json(self) -> dict[str, Any]:
        """The record: everything that was measured, and the choice."""
        return {
            "schema_version": SCHEMA_VERSION,
            "best": asdict(self.best),
            "plain": asdict(self.plain),
            "speedup": self.speedup,
            "measurements": [_row_json(row) for row in self.measurements],
            "compared": [_row_json(row) for row in self.compared],
            "left_out": [asdict(settings) for settings in self.left_out],
            "device": self.device,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the record as a JSON file."""
        return write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    def __str__(self) -> str:
        rows = [f"{self.best} on {self.device}: {self.speedup:.2f} times the samples a second"]
        for row in self.measurements:
            mark = "*" if row.settings == self.best else " "
            text = row.failed or f"{format_seconds(statistics.median(row.step_seconds))} a step"
            rows.append(f" {mark} {row.settings}: {text}")
        rows += [f"   {settings}: not reached within the seconds given" for settings in self.left_out]
        return "\n".join([*rows, *self.notes])


def _row_json(row: TuningMeasurement) -> dict[str, Any]:
    return {
        "settings": asdict(row.settings),
        "step_seconds": list(row.step_seconds),
        "seconds_per_sample": row.seconds_per_sample,
        "failed": row.failed,
    }


def faster(
    present: TuningMeasurement, others: Sequence[TuningMeasurement], least_gain: float
) -> TuningMeasurement:
    """The fastest by sample; the present one unless another gains the share ``least_gain`` over it.

    The same measurements give the same answer; of two that are equal, the earlier.
    """
    now = present.seconds_per_sample
    assert now is not None, "the present settings were run"
    best = min(
        (row for row in others if row.seconds_per_sample is not None),
        key=lambda row: row.seconds_per_sample or 0.0,
        default=present,
    )
    time = best.seconds_per_sample
    return best if time is not None and time < now * (1 - least_gain) else present
