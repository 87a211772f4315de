"""Tries plans on other batches of a workload whose model is built once. Child side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from memfit.capture.step import build_batch
from memfit.capture.workloads import from_reference
from memfit.planning.evaluate import Session
from memfit.planning.figures import Settings
from memfit.planning.fork import in_fork


class SizedSession(Session):
    """A session whose batch can be another one for each evaluation; the model stays."""

    def evaluate_at(self, workload: Mapping[str, Any], techniques: Sequence[Settings]) -> dict[str, Any]:
        """As `Session.evaluate`, on the batch of another reference to the same model.

        What cannot be built (more positions than the model has) is a failure too.
        """
        measure = partial(self._peaks_at, workload, techniques)
        return self._or_failure(partial(in_fork, measure), measure)

    def _peaks_at(self, workload: Mapping[str, Any], techniques: Sequence[Settings]) -> dict[str, int]:
        step = self._step
        before = step.batch
        step.batch = None
        step.batch = build_batch(from_reference(workload), device=step.device)
        try:
            return self._peaks(techniques)
        finally:
            step.batch = before  # where this process goes on
