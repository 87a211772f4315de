"""Tries plans on the made-up GPU or the imitated one: many in one process, or one in a process of its own.
Child side.

In one process each plan meets the allocator as a fresh process would: the optimizer's state is dropped,
cached memory is given back, and the steps run from the first one on. What the process keeps between plans are
the model's parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from memfit.capture.measure import measure_step
from memfit.capture.step import TrainingStep, build_step
from memfit.capture.tracker import StepTracker
from memfit.capture.true_values import reads_to_json, true_values
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU
from memfit.core.errors import MemfitError, UsageError
from memfit.planning.figures import Settings
from memfit.planning.plan import apply_settings, micro_batch_count, sample_count
from memfit.techniques import TECHNIQUES, Technique, undo
from memfit.techniques.blocks import block_names

STEPS = 3
QUICK_STEPS = 1
"""Steps before the one that is measured: the optimizer makes its state in the first."""
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
        self._open = ExitStack()  # until the process ends, or `close`
        device, _ = self._open.enter_context(device_of(engine, target))
        self._step = build_step(from_reference(workload), device=device, seed=seed)
        for _ in range(QUICK_STEPS + 1):
            self._step.run()

    def close(self) -> None:
        """Takes back what the engine changed in this process."""
        self._open.close()

    def facts(self) -> dict[str, Any]:
        """The JSON form of `memfit.planning.bench.ModelFacts`."""
        return model_facts(self._step)

    def graph(self, techniques: Sequence[Settings]) -> dict[str, Any]:
        """The captured step with ``techniques`` applied, as `StepGraph` JSON."""
        with applied(self._step, techniques):
            self._step.run()
            return StepTracker(self._step).run().to_json()

    def evaluate(self, techniques: Sequence[Settings]) -> dict[str, Any]:
        """The JSON form of `memfit.planning.bench.Peaks`: those of the last of a few steps."""
        try:
            with applied(self._step, techniques):
                return self._peaks()
        except (MemfitError, torch.OutOfMemoryError) as error:
            self._step.optimizer.zero_grad(set_to_none=True)
            return {**{f"{name}_bytes": 0 for name in _COUNTERS}, "failure": str(error)}

    def _peaks(self) -> dict[str, int]:
        self._step.optimizer.state.clear()
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(QUICK_STEPS):
            self._step.run()
        torch.cuda.reset_peak_memory_stats()
        self._step.run()
        statistics = torch.cuda.memory_stats()
        return {f"{name}_bytes": int(statistics[f"{name}_bytes.all.peak"]) for name in _COUNTERS}


def final(
    workload: Mapping[str, Any],
    techniques: Sequence[Settings],
    engine: str,
    target: Mapping[str, Any],
    trace_path: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Builds the workload, applies the plan and measures three real steps: all of it in this process, and
    nothing else.

    Returns the JSON of `memfit.capture.measure.measure_step` with ``value_reads`` and ``not_modelled``.
    """
    with device_of(engine, target) as (device, uncertain):
        step = build_step(from_reference(workload), device=device, seed=seed)
        with applied(step, techniques):
            result = measure_step(step, gpu=_gpu(target), steps=STEPS, categories=True, trace_path=trace_path)
        return {**result, **uncertain()}


@contextmanager
def device_of(engine: str, target: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
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
        with true_values() as reads:
            yield "cuda", lambda: {"value_reads": reads_to_json(reads), "not_modelled": []}


def _gpu(data: Mapping[str, Any]) -> GPU:
    """The GPU behind its JSON form: it may be one that no catalogue has."""
    return GPU(**{**data, "compute_capability": tuple(data["compute_capability"])})


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
    try:
        yield
    finally:
        step.micro_batches = before
        for _ in techniques:
            undo(step.model)


def model_facts(step: TrainingStep) -> dict[str, Any]:
    """The JSON form of `memfit.planning.bench.ModelFacts`: techniques are tried on for fit."""
    return {
        "blocks": list(block_names(step.model)),
        "samples": sample_count(step.batch),
        "chunked_loss": _grade(step, {"technique": "chunked_cross_entropy"}),
        "micro_batching": _grade(step, {"technique": "micro_batching"}),
        "implementations": _implementations(step),
    }


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
