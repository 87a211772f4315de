"""A finished profile: its steps, a trace of the detailed ones, and its folder on disk. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError
from memfit.core.files import write_atomically
from memfit.core.trace import Trace
from memfit.profiling.usage import MemoryUsage, StepMemory

SCHEMA = "memfit-profile"
SCHEMA_VERSION = 1
PROFILE_FILE = "profile.json"
TRACE_FILE = "profile.memfit-trace"
HISTORY_FILE = "allocator.pickle"


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """What a `memfit.MemoryProfiler` saw.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``: whose storages were noted.
        steps: every step, in order.
        trace: the events of the detailed steps that were kept, one after another, with category, phase,
            module, operator and line of each.
        frequency: every how many steps one was noted in detail.
        meta: what ran: versions, the script.
    """

    device_type: str
    steps: tuple[StepMemory, ...]
    trace: Trace
    frequency: int = 1
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def detailed_steps(self) -> tuple[StepMemory, ...]:
        """The steps that were noted in detail."""
        return tuple(step for step in self.steps if step.detailed)

    @property
    def peak_step(self) -> StepMemory | None:
        """The detailed step with the highest peak."""
        return max(self.detailed_steps, key=lambda step: step.peak_bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that were live at once."""
        step = self.peak_step
        return 0 if step is None else step.peak_bytes

    @property
    def usage(self) -> MemoryUsage:
        """The profile in short; prints well."""
        last = self.steps[-1] if self.steps else None
        return MemoryUsage(
            device_type=self.device_type,
            step=self.peak_step,
            steps_done=len(self.steps),
            steps_detailed=len(self.detailed_steps),
            current_bytes=self.detailed_steps[-1].end_bytes if self.detailed_steps else 0,
            device=None if last is None else last.device,
            frequency=self.frequency,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace, as plain values."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "device_type": self.device_type,
            "peak_bytes": self.peak_bytes,
            "profiling_frequency": self.frequency,
            "steps": [step.to_json() for step in self.steps],
            "trace": TRACE_FILE,
            "meta": dict(self.meta),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``profile.json`` and ``profile.memfit-trace`` into ``folder``, each whole or not at all.

        Raises:
            UsageError: the place cannot be written to.
        """
        target = Path(folder)
        self.trace.save(target / TRACE_FILE)
        return write_atomically(target / PROFILE_FILE, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile from its folder, or from the ``profile.json`` in it.

        Raises:
            InputError: there is none, or it is broken.
        """
        file = Path(path) / PROFILE_FILE if Path(path).is_dir() else Path(path)
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(f"{file} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{file} is not a profile that memfit saved")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"{file}: schema_version is {data.get('schema_version')!r}; this memfit reads "
                f"{SCHEMA_VERSION}"
            )
        try:
            return cls(
                device_type=str(data["device_type"]),
                steps=tuple(StepMemory.from_json(step) for step in data["steps"]),
                trace=Trace.load(file.parent / TRACE_FILE),
                frequency=int(data["profiling_frequency"]),
                meta=dict(data["meta"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file} is a broken profile: {type(error).__name__}: {error}") from error
