"""What came of a case, and the file in which outcomes wait for the next run of the benchmark."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError
from memfit.core.files import write_atomically
from prediction.case import SCRIPTS, Case
from prediction.engines import Prediction

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case and what the engines said; neither for an excluded one."""

    source: str
    case: Case
    dryrun: Prediction | None = None
    portable: Prediction | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of the dry run (of the portable engine where only that ran)."""
        return relative_error(self.case, self.dryrun or self.portable)

    @property
    def rounded(self) -> bool:
        """Whether the prediction is what was measured, as finely as that was printed."""
        run, measured = self.dryrun or self.portable, self.case.measured_bytes
        if run is None or run.predicted_bytes is None or measured is None:
            return False
        return 2 * abs(run.predicted_bytes - measured) <= self.case.resolution_bytes


def relative_error(case: Case, prediction: Prediction | None) -> float | None:
    """None where there is nothing to compare."""
    measured = case.measured_bytes
    if prediction is None or prediction.predicted_bytes is None or measured is None:
        return None
    return prediction.predicted_bytes / measured - 1


class Kept:
    """Predictions by what was run, whatever row asks for it.

    A file, if given, is read first and written after each new one.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._known = self._read(path)

    def find(self, case: Case, engine: str) -> Prediction | None:
        """The prediction of an earlier run of the very same thing, if it came to one."""
        known = self._known.get(_key(case, engine))
        if known is None or known["prediction"]["error"]:
            return None
        return Prediction(
            **{**known["prediction"], "not_modelled": tuple(known["prediction"]["not_modelled"])}
        )

    def add(self, source: str, case: Case, prediction: Prediction) -> None:
        """Keep one."""
        self._known[_key(case, prediction.engine)] = {
            "source": source,
            "row": dict(case.row),
            "prediction": asdict(prediction),
        }
        if self._path is not None:
            whole = {"schema_version": SCHEMA_VERSION, "predictions": self._known}
            write_atomically(self._path, json.dumps(whole, indent=1))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            version, known = whole["schema_version"], whole["predictions"]
        except (ValueError, KeyError, TypeError) as problem:
            raise InputError(f"{path} has no predictions of this benchmark: {problem}") from problem
        if version != SCHEMA_VERSION:
            raise InputError(f"{path} is of schema version {version}; this benchmark reads {SCHEMA_VERSION}")
        return dict(known)


def _key(case: Case, engine: str) -> str:
    script = hashlib.sha256((SCRIPTS / case.script).read_bytes()).hexdigest()
    run = [
        engine, case.script, script, case.words, case.gpu, case.counter, case.above, dict(case.environment),
        case.world_size, case.ranks,
    ]  # fmt: skip
    return json.dumps(run, sort_keys=True)
