"""The two oracles: the dry run on the made-up GPU, and the portable engine where that cannot be had. Parent side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import CannotRunHere, ToolFailure
from memfit.dryrun.worker import Session, Worker, preload_for
from memfit.planning.bench import Final, ModelFacts, Oracle, Peaks
from memfit.planning.figures import Settings, StepFigures

Engine = Literal["auto", "dryrun", "portable"]
ROOMY_BYTES = 4 << 40
"""Memory of the device that plans are tried on: steps that do not fit the real one are measured as well."""


@contextmanager
def open_oracle(
    workload: Mapping[str, Any],
    spec: str | None,
    gpu: GPU,
    folder: Path,
    *,
    engine: Engine = "auto",
    seed: int = 0,
) -> Iterator[Oracle]:
    """The oracle for a workload: the dry run, or with ``engine="auto"`` the portable engine where that cannot be had.

    Args:
        workload: a reference that child processes can follow.
        spec: the workload's text, if it has one: tells what to load before the first fork.
        folder: where traces go.

    Raises CannotRunHere when the engine that was asked for cannot run on this machine.
    """
    with ExitStack() as stack:
        try:
            worker = stack.enter_context(Worker(gpu, preload=preload_for(spec)))
        except CannotRunHere:
            raise
        oracle = DryRunOracle(worker, workload, gpu, folder, seed)
        stack.callback(oracle.close)
        yield oracle


class DryRunOracle:
    """Runs steps in forks of one worker process, with PyTorch's own allocator on the made-up GPU."""

    engine = "dryrun"
    engine_reason: str | None = None

    def __init__(
        self, worker: Worker, workload: Mapping[str, Any], gpu: GPU, folder: Path, seed: int
    ) -> None:
        self._worker = worker
        self._workload = workload
        self._gpu = replace(gpu, runtime_total_bytes=ROOMY_BYTES, nvml_total_bytes=ROOMY_BYTES)
        self._folder = folder
        self._seed = seed
        self._stack = ExitStack()
        self._session: Session | None = None

    def close(self) -> None:
        """Ends the session's process."""
        self._stack.close()

    @property
    def session(self) -> Session:
        """The long-lived fork in which plans are tried; started when first asked for."""
        if self._session is None:
            manager = self._worker.session(
                "memfit.planning.evaluate:Session", gpu=self._gpu, workload=self._workload, seed=self._seed
            )
            self._session = self._stack.enter_context(manager)
        return self._session

    def facts(self) -> ModelFacts:
        """See `Oracle`."""
        return ModelFacts.from_json(self.session.call("facts"))

    def graph(self, techniques: Sequence[Settings]) -> StepGraph:
        """See `Oracle`."""
        return StepGraph.from_json(self.session.call("graph", techniques=list(techniques)))

    def evaluate(self, techniques: Sequence[Settings]) -> Peaks:
        """See `Oracle`."""
        return Peaks(**self.session.call("evaluate", techniques=list(techniques)))

    def final(self, techniques: Sequence[Settings], *, trace: str | None = None) -> Final:
        """See `Oracle`."""
        path = None if trace is None else str(self._folder / f"{trace}.memfit-trace")
        result = self._worker.call(
            "memfit.planning.evaluate:final",
            gpu=self._gpu,
            workload=self._workload,
            techniques=list(techniques),
            gpu_key=self._gpu.key,
            trace_path=path,
            seed=self._seed,
        )
        return final_from_json(result, path)


def final_from_json(result: Mapping[str, Any], trace_path: str | None) -> Final:
    """What `memfit.planning.evaluate.final` returned, as a value."""
    if result.get("oom"):
        raise ToolFailure(
            f"the step ran out of memory even on a device of {ROOMY_BYTES >> 40} TiB: {result['oom']}"
        )
    return Final(
        figures=StepFigures.from_json(
            {**result, "peak_by_phase": result.get("phase_peaks"), "trace_path": trace_path}
        ),
        value_reads=tuple(result.get("value_reads", ())),
        not_modelled=tuple(result.get("not_modelled", ())),
        torch=result.get("torch"),
    )
