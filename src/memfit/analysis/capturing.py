"""The step of a workload as a graph, by the best engine that this machine has."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU, find_gpu
from memfit.core.workload import Workload

if TYPE_CHECKING:
    from memfit.planning.oracle import Engine, StepOracle

PLAIN_GPU = "a100-80gb"
"""The GPU that a step is captured for where none is named."""


def captured(workload: Workload | str, gpu: GPU | None) -> StepGraph:
    """The graph of the plain step: the dry run's, or the portable engine's where that cannot be had.

    Raises:
        WorkloadFailed: the workload's own code raised.
    """
    with opened_oracle(workload, find_gpu(PLAIN_GPU) if gpu is None else gpu) as oracle:
        return oracle.graph(())


@contextmanager
def opened_oracle(workload: Workload | str, gpu: GPU, engine: Engine = "auto") -> Iterator[StepOracle]:
    """Where a workload's step can be captured and techniques can be tried on it, until the block ends."""
    from memfit.planning.oracle import open_oracle

    reference, spec = reference_of(workload)
    with (
        tempfile.TemporaryDirectory(prefix="memfit-") as folder,
        open_oracle(reference, spec, gpu, Path(folder), engine=engine) as oracle,
    ):
        yield oracle


def reference_of(workload: Workload | str) -> tuple[dict[str, Any], str | None]:
    """How child processes build the workload, and its text. Texts are read there: no torch is loaded here."""
    if isinstance(workload, str):
        return {"spec": workload, "folder": os.getcwd()}, workload
    from memfit.capture.workloads import workload_reference

    return workload_reference(workload), workload.spec
