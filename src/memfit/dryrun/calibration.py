"""What `memfit calibrate` measured on a GPU, remembered per GPU in a file of the user's, and how it narrows.

One JSON file for each GPU in ``$MEMFIT_CALIBRATION``, else ``$XDG_CONFIG_HOME/memfit/calibration``, else
``~/.config/memfit/calibration``. A calibration counts for its GPU and its version of PyTorch only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from memfit.core.errors import InputError
from memfit.core.files import write_atomically

SCHEMA_VERSION = 1
FOLDER_VARIABLE = "MEMFIT_CALIBRATION"


@dataclass(frozen=True, kw_only=True)
class WorkspaceReading:
    """The workspace of one convolution.

    Args:
        configuration: dtype, layout, shapes, in words.
        family: ``forward``, ``backward data`` or ``backward filter``.
        measured_bytes: the largest block that lived only during the call.
        rule_bytes: what the rule in ``native/workspaces.c`` says.
    """

    configuration: str
    family: str
    measured_bytes: int
    rule_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepReading:
    """The peaks of one small training step on the GPU."""

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on one GPU.

    Args:
        gpu: its key in the catalogue (see ``memfit gpus``).
        name: what the driver calls it.
        driver, cuda, torch, cudnn: versions.
        bare_context_bytes: what the process held on the device before its first tensor.
        loaded_context_bytes: what it held beside PyTorch's segments after the steps.
        workspaces, steps: the readings.
    """

    gpu: str
    name: str
    driver: str
    cuda: str
    torch: str
    cudnn: str
    bare_context_bytes: int
    loaded_context_bytes: int
    workspaces: tuple[WorkspaceReading, ...] = ()
    steps: tuple[StepReading, ...] = ()

    @property
    def workspace_shares(self) -> tuple[float, float]:
        """The middle and the largest of measured workspaces, as shares of the rule's; (1, 1) if none was."""
        shares = [one.measured_bytes / one.rule_bytes for one in self.workspaces if one.rule_bytes]
        return (median(shares), max(shares)) if shares else (1.0, 1.0)

    @property
    def summary(self) -> str:
        """In a line."""
        return f"measured on {self.name}, driver {self.driver}, torch {self.torch}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with ``schema_version`` first."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The value that `to_json` wrote.

        Raises:
            InputError: another schema version, or keys that are missing.
        """
        version = value.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"schema_version of this calibration is {version!r}; this memfit reads {SCHEMA_VERSION}; "
                "run memfit calibrate again"
            )
        rest = {key: part for key, part in value.items() if key != "schema_version"}
        try:
            readings = tuple(WorkspaceReading(**one) for one in rest.pop("workspaces"))
            steps = tuple(StepReading(**one) for one in rest.pop("steps"))
            return cls(**rest, workspaces=readings, steps=steps)
        except (TypeError, KeyError) as error:
            raise InputError(f"not a whole calibration: {error}; run memfit calibrate again") from error


def calibration_folder() -> Path:
    """Where the files are."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "memfit" / "calibration"


def remember(calibration: Calibration) -> Path:
    """Write it, in place of what was there for its GPU.

    Raises:
        UsageError: the folder cannot be written to.
    """
    return write_atomically(_file_of(calibration.gpu), json.dumps(calibration.to_json(), indent=1) + "\n")


def find_calibration(gpu: str, torch: str) -> Calibration | None:
    """What was measured on such a GPU with this version of PyTorch; None: nothing, or nothing readable."""
    try:
        found = read_calibration(_file_of(gpu))
    except (InputError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return found if found is not None and found.torch == torch else None


def read_calibration(path: Path) -> Calibration | None:
    """The calibration of one file; None: there is no such file.

    Raises:
        InputError: it is something else.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no calibration: {error}; run memfit calibrate again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is no calibration, but a {type(value).__name__}; calibrate again")
    return Calibration.from_json(value)


def all_calibrations() -> tuple[tuple[Path, Calibration], ...]:
    """Every file with what it holds, by name.

    Raises:
        InputError: a file is something else.
    """
    files = sorted(calibration_folder().glob("*.json"))
    return tuple((path, found) for path in files if (found := read_calibration(path)) is not None)


def forget(gpu: str | None = None) -> int:
    """Remove what is known of one GPU, or of all; how many files were there."""
    files = list(calibration_folder().glob("*.json")) if gpu is None else [_file_of(gpu)]
    there = [path for path in files if path.is_file()]
    for path in there:
        path.unlink()
    return len(there)


def _file_of(gpu: str) -> Path:
    return calibration_folder() / f"{re.sub(r'[^A-Za-z0-9.=_-]', '_', gpu)}.json"
