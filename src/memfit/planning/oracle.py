"""The oracle behind a search: the dry run on the made-up GPU, or the portable engine where that cannot be
had. Parent side.

Both are the same code in a child process (see `memfit.planning.evaluate`): the dry run builds on ``cuda``,
with PyTorch's own allocator; the portable engine on ``meta``, with an imitation of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import CannotRunHere, ToolFailure, UsageError
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.worker import Worker, preload_for
from memfit.planning.bench import Final, ModelFacts, Peaks
from memfit.planning.figures import Settings, StepFigures

Engine = Literal["auto", "dryrun", "portable"]
ROOMY_BYTES = 4 << 40
"""Memory of the made-up device that plans are tried on: steps that do not fit the real one are measured as
well."""


_APPLYING = ("memfit.techniques.recomputable_region", "memfit.techniques.selective")
"""What applying most plans loads: else each fork loads it anew."""


def preload(spec: str | None, module: str = "memfit.planning.evaluate") -> tuple[str, ...]:
    """What to load before the first fork: what the workload needs, what torch loads by itself later, and our
    own part."""
    return (*preload_for(spec), "?torch._dynamo", module, *_APPLYING)


class Remote(Protocol):
    """An object elsewhere whose methods are called by name, with JSON both ways."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls ``method``."""
        ...


class Runner(Protocol):
    """Where functions and objects of the child side live: a `Worker`, or this process."""

    def call(self, function: str, **arguments: Any) -> Any:
        """Runs ``"package.module:function"``."""
        ...

    def session(self, cls: str, **arguments: Any) -> AbstractContextManager[Remote]:
        """Builds ``"package.module:Class"`` and lets its methods be called."""
        ...


@contextmanager
def open_oracle(
    workload: Mapping[str, Any],
    spec: str | None,
    gpu: GPU,
    folder: Path,
    *,
    engine: Engine = "auto",
    seed: int = 0,
) -> Iterator[StepOracle]:
    """The oracle for a workload: the dry run, or with ``engine="auto"`` the portable engine where that cannot
    be had.

    Args:
        workload: a reference that child processes can follow.
        spec: the workload's text, if it has one: tells what to load before the first fork.
        folder: where traces go.

    Raises CannotRunHere when the engine that was asked for cannot run on this machine.
    """
    if engine not in ("auto", "dryrun", "portable"):
        raise UsageError(f"engine {engine!r} is unknown: use auto, dryrun or portable")
    reason: str | None = None
    with ExitStack() as stack:
        worker: Runner | None = None
        if engine != "portable":
            roomy = replace(gpu, runtime_total_bytes=ROOMY_BYTES, nvml_total_bytes=ROOMY_BYTES)
            try:
                worker = stack.enter_context(Worker(roomy, preload=preload(spec)))
            except CannotRunHere as problem:
                if engine == "dryrun":
                    raise
                reason = str(problem)
        name = "portable" if worker is None else "dryrun"
        if worker is None:
            worker = _portable_runner(stack, spec)
        yield stack.enter_context(StepOracle(worker, workload, gpu, folder, seed, engine=name, reason=reason))


def _portable_runner(stack: ExitStack, spec: str | None) -> Runner:
    """Forks of a process without any GPU, or this process where there is no fork."""
    if hasattr(os, "fork"):
        return stack.enter_context(Worker(None, preload=preload(spec)))
    return InProcess()


class StepOracle:
    """Runs a workload's step with plans applied; see `memfit.planning.bench.Oracle`, which this is."""

    def __init__(
        self,
        runner: Runner,
        workload: Mapping[str, Any],
        gpu: GPU,
        folder: Path,
        seed: int,
        *,
        engine: str,
        reason: str | None,
    ) -> None:
        self.engine = engine
        self.engine_reason = reason
        self._runner = runner
        self._folder = folder
        self._gpu = gpu
        self._arguments: dict[str, Any] = {
            "workload": dict(workload),
            "engine": engine,
            "target": gpu_json(gpu),
            "seed": seed,
        }
        self._stack = ExitStack()
        self._session: Remote | None = None

    def __enter__(self) -> StepOracle:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def session(self) -> Remote:
        """The one long-lived object in which plans are tried; made when first asked for."""
        if self._session is None:
            opening = self._runner.session("memfit.planning.evaluate:Session", **self._arguments)
            self._session = self._stack.enter_context(opening)
        return self._session

    @property
    def workload(self) -> dict[str, Any]:
        """The reference of the workload that is run."""
        return dict(self._arguments["workload"])

    def facts(self) -> ModelFacts:
        """See `Oracle`."""
        return ModelFacts.from_json(self.session.call("facts"))

    def graph(self, techniques: Sequence[Settings]) -> StepGraph:
        """See `Oracle`."""
        return StepGraph.from_json(self.session.call("graph", techniques=list(techniques)))

    def evaluate(self, techniques: Sequence[Settings]) -> Peaks:
        """See `Oracle`."""
        return Peaks(**self.session.call("evaluate", techniques=list(techniques)))

    def evaluate_all(self, plans: Sequence[Sequence[Settings]]) -> list[Peaks]:
        """What `evaluate` says of each plan, several run at once."""
        found = self.session.call("evaluate_all", plans=[list(plan) for plan in plans])
        return [Peaks(**peaks) for peaks in found]

    def with_workload(self, workload: Mapping[str, Any]) -> StepOracle:
        """An oracle of the same processes for another workload; close it by itself (``with``)."""
        return StepOracle(
            self._runner,
            workload,
            self._gpu,
            self._folder,
            self._arguments["seed"],
            engine=self.engine,
            reason=self.engine_reason,
        )

    def open(self, cls: str, **arguments: Any) -> AbstractContextManager[Remote]:
        """Another object of the child side, built with the workload and the device."""
        return self._runner.session(cls, **self._arguments, **arguments)

    def call(self, function: str, **arguments: Any) -> Any:
        """Runs ``"package.module:function"`` in a process of its own; it gets the workload and the device."""
        return self._runner.call(function, **self._arguments, **arguments)

    def final(
        self,
        techniques: Sequence[Settings],
        *,
        trace: str | None = None,
        answers: Mapping[str, str] | None = None,
    ) -> Final:
        """See `Oracle`."""
        path = None if trace is None else str(self._folder / f"{trace}.memfit-trace")
        result = self._runner.call(
            "memfit.planning.evaluate:final",
            techniques=list(techniques),
            trace_path=path,
            answers=None if answers is None else dict(answers),
            **self._arguments,
        )
        return _final_from_json(result, path, self.engine)


class InProcess:
    """A runner without processes, for systems that cannot fork."""

    def call(self, function: str, **arguments: Any) -> Any:
        """Runs the function here."""
        return _resolve(function)(**arguments)

    @contextmanager
    def session(self, cls: str, **arguments: Any) -> Iterator[Remote]:
        """Builds the object here."""
        built = _resolve(cls)(**arguments)
        try:
            yield _Local(built)
        finally:
            built.close()


class _Local:
    def __init__(self, built: Any) -> None:
        self._built = built

    def call(self, method: str, **arguments: Any) -> Any:
        return getattr(self._built, method)(**arguments)


def gpu_json(gpu: GPU) -> dict[str, Any]:
    """The GPU as JSON."""
    data = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    return {**data, "peak_flops": dict(gpu.peak_flops), "sources": dict(gpu.sources)}


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _final_from_json(result: Mapping[str, Any], trace_path: str | None, engine: str) -> Final:
    if result.get("oom"):
        raise ToolFailure(f"the step needs more than {ROOMY_BYTES >> 40} TiB: {result['oom']}")
    kept = trace_path if trace_path is not None and Path(trace_path).exists() else None
    return Final(
        figures=StepFigures.from_json(
            {**result, "peak_by_phase": result.get("phase_peaks"), "trace_path": kept}
        ),
        value_reads=tuple(result.get("value_reads", ())),
        not_modelled=tuple(result.get("not_modelled", ())),
        torch=result.get("torch"),
        dry_run=DryRunResult.from_measure(result) if engine == "dryrun" else None,
    )
