"""Tries plans on the made-up GPU or the imitated one: many from one process, or one in a process of its own.
Child side.

The session's process builds the workload and runs nothing; each plan runs in a fork of it. So it meets the
allocator as in a process of its own, and what it reserves is what it would reserve there.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit.capture.measure import device_account, measure_step
from memfit.capture.step import TrainingStep, build_step
from memfit.capture.tracker import StepTracker
from memfit.capture.true_values import on_made_up_gpu, reads_to_json, true_values
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU
from memfit.core.errors import MemfitError, ToolFailure, UsageError
from memfit.dryrun.interception import resume
from memfit.planning.evaluate_compiled import compiled, is_compiled, is_fused
from memfit.planning.figures import Settings
from memfit.planning.fork import begun_in_fork, in_fork
from memfit.planning.plan import apply_settings, micro_batch_count, parameter_shapes, sample_count
from memfit.techniques import TECHNIQUES, MixedPrecisionTraining, Technique, mixed_precision_of, undo
from memfit.techniques.blocks import block_names

STEPS = 3
_COUNTERS = ("requested", "allocated", "reserved")
ROOMY_BYTES = 4 << 40
"""Memory of the device that plans are tried on: steps that do not fit the real one are measured as well."""


class Session:
    """One workload built once, on which plans are put, measured and taken off again.

    Args:
        workload: a reference of `memfit.capture.workloads.workload_reference`.
        engine: ``"dryrun"`` or ``"portable"``.
        target: the GPU that is planned for, as `dataclasses.asdict` gives it.
        seed: of everything random.
    """

    def __init__(
        self, workload: Mapping[str, Any], engine: str, target: Mapping[str, Any], seed: int = 0
    ) -> None:
        torch.set_num_threads(1)  # a pool of threads would not survive the forks
        self._open = ExitStack()  # until the process ends, or `close`
        device, _ = self._open.enter_context(device_of(engine, target))
        self._step = build_step(from_reference(workload), device=device, seed=seed)
        if on_made_up_gpu():
            torch.cuda._is_in_bad_fork = lambda: False  # it is a good one: see `memfit.planning.fork`
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Takes back what the engine changed in this process."""
        self._open.close()

    def facts(self) -> dict[str, Any]:
        """The JSON form of `memfit.planning.bench.ModelFacts`."""
        return model_facts(self._step)

    def graph(self, techniques: Sequence[Settings]) -> dict[str, Any]:
        """The captured step with ``techniques`` applied, as `StepGraph` JSON."""
        return dict(in_fork(lambda: self._captured(techniques)))

    def evaluate(self, techniques: Sequence[Settings]) -> dict[str, Any]:
        """The JSON form of `memfit.planning.bench.Peaks`, of the step after the optimizer's state is there.

        The plain step has run before, so whatever is raised here is the plan's doing: a reason not to take
        it.
        """
        return self.evaluate_all([techniques])[0]

    def evaluate_all(self, plans: Sequence[Sequence[Settings]]) -> list[dict[str, Any]]:
        """What `evaluate` says of each plan; as many run at once as this machine has cores."""
        measures = [partial(self._peaks, plan) for plan in plans]
        found, at_once = [], max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 1)
        for first in range(0, len(measures), at_once):
            group = measures[first : first + at_once]
            begun = [begun_in_fork(measure) for measure in group]
            found += [self._or_failure(*both) for both in zip(begun, group, strict=True)]
        return found

    @staticmethod
    def _or_failure(wait: Callable[[], Any], measure: Callable[[], dict[str, int]]) -> dict[str, Any]:
        """What a fork measures, or why it could not. A fork that died says nothing of the plan: it is asked
        again, once."""
        try:
            try:
                return dict(wait())
            except ToolFailure:
                return dict(in_fork(measure))
        except MemfitError as error:
            return {**{f"{name}_bytes": 0 for name in _COUNTERS}, "failure": str(error)}

    def _captured(self, techniques: Sequence[Settings]) -> dict[str, Any]:
        with self._started(techniques):
            return StepTracker(self._step, temporaries=True).run().to_json()

    def _peaks(self, techniques: Sequence[Settings]) -> dict[str, int]:
        with self._started(techniques):
            if is_compiled(techniques):
                gc.collect()  # a first compiled step leaves reference cycles that hold tensors
            if is_fused(techniques):
                torch.cuda.empty_cache()  # and the compiler's own trials what they were tried on
            torch.cuda.reset_peak_memory_stats()
            self._step.run()
            statistics = torch.cuda.memory_stats()
            held = held_on_host(self._step)
        peaks = {f"{name}_bytes": int(statistics[f"{name}_bytes.all.peak"]) for name in _COUNTERS}
        return {**peaks, "host_bytes": held}

    @contextmanager
    def _started(self, techniques: Sequence[Settings]) -> Iterator[None]:
        """The step with a plan applied, after its first run; as new again where this process goes on."""
        if on_made_up_gpu():
            resume()  # true values are followed in forks only when told so
        with applied(self._step, techniques):
            try:
                if self._step.steps_done:  # no fork: another plan ran here before
                    self._step.optimizer.state.clear()
                    torch.cuda.empty_cache()
                self._step.run()
                yield
            finally:
                self._step.optimizer.zero_grad(set_to_none=True)


def final(
    workload: Mapping[str, Any],
    techniques: Sequence[Settings],
    engine: str,
    target: Mapping[str, Any],
    trace_path: str | None = None,
    seed: int = 0,
    answers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Builds the workload, applies the plan and measures three real steps: all of it in this process, and
    nothing else.

    Args:
        answers: by place, other answers than the expected ones where values are read that are not known;
            who is alive at the peak is then not told.

    Returns the JSON of `memfit.capture.measure.measure_step` with ``value_reads`` and ``not_modelled``; from
    the dry run also the other keys of `memfit.dryrun.result.DryRunResult`.
    """
    started, gpu = time.perf_counter(), _gpu(target)
    with device_of(engine, target, answers) as (device, uncertain), compiled(techniques) as costs_of:
        step = build_step(from_reference(workload), device=device, seed=seed)
        with applied(step, techniques):
            if costs_of is not None:  # a tracker would run it operator by operator
                emptied = is_fused(techniques)
                result = measure_step(step, gpu=gpu, steps=STEPS, empty_cache=emptied)
                result |= costs_of(result, gpu)
            else:
                result = measure_step(
                    step, gpu=gpu, steps=STEPS, categories=not answers, trace_path=trace_path
                )
            result["host_bytes"] = held_on_host(step)
        account = device_account(gpu, result) if engine == "dryrun" else {}
        return {**result, **account, **uncertain(), "wall_seconds": time.perf_counter() - started}


@contextmanager
def device_of(
    engine: str, target: Mapping[str, Any], answers: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The device that an engine builds on, ready for use, and what tells what it was not sure of."""
    if engine == "portable":
        from memfit.capture.portable import DEVICE, portable_gpu

        roomy = replace(_gpu(target), runtime_total_bytes=ROOMY_BYTES, nvml_total_bytes=ROOMY_BYTES)
        with portable_gpu(roomy) as portable:
            yield (
                DEVICE,
                lambda: {
                    "value_reads": reads_to_json(portable.reads),
                    "not_modelled": portable.not_modelled(),
                },
            )
    else:
        with true_values(answers) as uncertain:
            yield "cuda", uncertain.to_json


def _gpu(data: Mapping[str, Any]) -> GPU:
    """The GPU behind its JSON form: it may be one that no catalogue has."""
    return GPU(**{**data, "compute_capability": tuple(data["compute_capability"])})


def held_on_host(step: TrainingStep) -> int:
    """Bytes of the host that a step on the made-up GPU has pinned, and of parameters and states that live
    there unpinned."""
    if not on_made_up_gpu():
        return 0
    pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = {
        id(t): t for t in (*states, *step.model.parameters()) if isinstance(t, torch.Tensor) and t.dim()
    }
    return pinned + sum(t.nbytes for t in tensors.values() if t.device.type == "cpu" and not t.is_pinned())


@contextmanager
def copies_take_time(techniques: Sequence[Settings]) -> Iterator[None]:
    """On the made-up GPU copies are done at once. For plans that offload none is done before it is waited
    for, so that what a real GPU may still hold while it copies is in the peaks."""
    offloads = any(settings["technique"] == "activation_offload" for settings in techniques)
    if not offloads or not on_made_up_gpu():
        yield
        return
    query = torch.cuda.Event.query
    torch.cuda.Event.query = lambda event: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.Event.query = query  # type: ignore[method-assign]


@contextmanager
def applied(step: TrainingStep, techniques: Sequence[Settings]) -> Iterator[None]:
    """The step with ``techniques`` applied, taken off again at the end, first come last gone."""
    before = step.micro_batches
    count = micro_batch_count(techniques)
    if count > sample_count(step.batch):
        raise UsageError(
            f"cannot cut a batch of {sample_count(step.batch)} samples into {count} micro-batches"
        )
    apply_settings(techniques, step.model, step.optimizer)
    step.micro_batches = count if count > 1 else before
    scaler, mixed = step.scaler, mixed_precision_of(step.model)
    if mixed is not None and mixed.scales_losses and scaler is None:
        step.scaler = _LossScaling(mixed)  # type: ignore[assignment]
    try:
        with copies_take_time(techniques):
            yield
    finally:
        step.micro_batches, step.scaler = before, scaler
        for _ in techniques:
            undo(step.model)


class _LossScaling:
    """Mixed precision in the place of a gradient scaler: the optimizer's own step unscales and updates."""

    def __init__(self, mixed: MixedPrecisionTraining) -> None:
        self.scale = mixed.scale_loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        """Is done by the step."""


def model_facts(step: TrainingStep) -> dict[str, Any]:
    """The JSON form of `memfit.planning.bench.ModelFacts`: techniques are tried on for fit."""
    return {
        "blocks": list(block_names(step.model) or _large_parts(step.model)),
        "samples": sample_count(step.batch),
        "rematerialization": _grade(step, {"technique": "rematerialization", "blocks": {"": []}}),
        "chunked_loss": _grade(step, {"technique": "chunked_cross_entropy"}),
        "micro_batching": _grade(step, {"technique": "micro_batching"}),
        "implementations": _implementations(step),
        "expandable_segments": "exact" if on_made_up_gpu() else None,
        "fingerprint": parameter_shapes(step.model),
    }


def _large_parts(model: torch.nn.Module) -> list[str]:
    """Where a model repeats nothing: its direct parts that are built of modules and called as a whole."""
    return [
        name
        for name, part in model.named_children()
        if type(part).forward is not torch.nn.Module.forward
        and any(True for _ in part.children())
        and any(True for _ in part.parameters())
    ]


def _grade(step: TrainingStep, settings: Settings) -> str | None:
    """How exact a technique is on this model; None where it cannot be applied."""
    kind = TECHNIQUES.get(settings["technique"])
    if kind is None:
        return None
    technique: Technique = kind.from_settings(settings)
    try:
        technique.apply(step.model, step.optimizer)
    except UsageError:
        return None
    undo(step.model)
    return technique.exactness(step.model)


def _implementations(step: TrainingStep) -> dict[str, str]:
    """The optimizer's leanest implementation, where it has one and does not use it yet."""
    grade = _grade(step, {"technique": "optimizer_implementation", "implementation": "fused"})
    already = all(group.get("fused") for group in step.optimizer.param_groups)
    return {} if grade is None or already else {"fused": grade}
