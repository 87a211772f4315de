"""Runs a workload's steps for real with techniques applied, on the CPU or a real GPU. Child side.

The losses are those of training that goes on: each step draws its batch anew where the batch factory draws
one (a factory that always gives the same batch trains on that), and the loss that counts is taken in
evaluation mode on batches that no step has seen. Runs with the same seed see the same batches.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memfit.capture.step import TrainingStep, build_step, takes_size
from memfit.capture.tracker import StepTracker
from memfit.capture.workloads import from_reference
from memfit.planning.evaluate import applied
from memfit.planning.figures import Settings
from memfit.planning.plan import sample_count

FIRST_STEPS = 2
"""Steps that are not timed where there are more: the optimizer's state is made in them."""
HELD_OUT = 4
"""Batches that are held out for the loss that counts."""


def size_facts(workload: Mapping[str, Any], engine: str, target: Any, seed: int = 0) -> dict[str, Any]:
    """What decides in which form the workload can run here: parameters, samples, memory, a small form."""
    import psutil

    del engine, target, seed
    made = from_reference(workload)
    with torch.device("meta"):
        model = made.model()
        batch = made.batch()
    return {
        "has_small_form": takes_size(made),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples": sample_count(batch),
        "available_bytes": int(psutil.virtual_memory().available),
    }


def trained(
    workload: Mapping[str, Any],
    engine: str,
    target: Any,
    techniques: Sequence[Settings],
    form: Mapping[str, Any],
    steps: int,
    seeds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Trains for ``steps`` with each of ``seeds`` seeds on the CPU, one thread.

    Args:
        form: ``{"size": "full" | "small", "samples": how many to cut the batch to, or None}``.

    Returns:
        ``{"losses": [per seed], "step_seconds": the median step}``.
    """
    del engine, target
    torch.set_num_threads(1)
    losses, seconds = [], []
    for number in range(seed, seed + seeds):
        step = _built(workload, "cpu", form, number)
        with applied(step, techniques):
            torch.manual_seed(number)
            seconds += _train(step, form, number, steps)
            losses.append(_held_out_loss(step, form, number))
    return {"losses": losses, "step_seconds": statistics.median(seconds)}


def measured(
    workload: Mapping[str, Any],
    engine: str,
    target: Any,
    techniques: Sequence[Settings],
    form: Mapping[str, Any],
    device: str,
    steps: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Peaks and the median time of a step on a real device.

    On the CPU the peak is that of the tensors' own storages, as captured in a step of its own; nothing is
    allocated in blocks or reserved there that PyTorch counts.
    """
    del engine, target
    if device == "cpu":
        torch.set_num_threads(1)
    step = _built(workload, device, form, seed)
    with applied(step, techniques):
        torch.manual_seed(seed)
        seconds = _train(step, form, seed, steps)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step.run()
            torch.cuda.synchronize()
            counts = torch.cuda.memory_stats()
            peaks = {
                f"peak_{name}_bytes": int(counts[f"{name}_bytes.all.peak"])
                for name in ("requested", "allocated", "reserved")
            }
        else:
            peaks = {"peak_requested_bytes": int(StepTracker(step).run().peak_bytes)}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    return {**peaks, "step_seconds": statistics.median(seconds), "device_name": name}


def has_gpu(workload: Any, engine: str, target: Any, seed: int = 0) -> bool:
    """Whether PyTorch finds a GPU here."""
    del workload, engine, target, seed
    return torch.cuda.is_available()


def _built(workload: Mapping[str, Any], device: str, form: Mapping[str, Any], seed: int) -> TrainingStep:
    small = form["size"] == "small"
    step = build_step(from_reference(workload), device=device, size="small" if small else "full", seed=seed)
    step.batch = _cut(step.batch, form["samples"])
    return step


def _train(step: TrainingStep, form: Mapping[str, Any], seed: int, steps: int) -> list[float]:
    """Trains; the seconds of each step that counts."""
    seconds = []
    for number in range(steps):
        step.batch = _batch(step, form, 1_000_003 * (seed + 1) + number)
        torch.manual_seed(seed + number)
        begun = time.perf_counter()
        step.run()
        if step.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds[FIRST_STEPS:] or seconds


def _batch(step: TrainingStep, form: Mapping[str, Any], seed: int) -> Any:
    """A batch as the workload makes it, with the random state put to ``seed`` before."""
    make = step.workload.batch
    sized = {"size": form["size"]} if "size" in inspect.signature(make).parameters else {}
    torch.manual_seed(seed)
    with step.device:
        batch = make(**sized)
    return _cut(_moved(batch, step.device), form["samples"])


def _held_out_loss(step: TrainingStep, form: Mapping[str, Any], seed: int) -> float:
    """The mean loss in evaluation mode over batches with seeds that no step had."""
    step.model.eval()
    losses = []
    with torch.no_grad():
        for number in range(HELD_OUT):
            batch = _batch(step, form, 7_000_001 + 1_000 * seed + number)
            with step.autocast():
                losses.append(float(step.workload.loss(step.model, batch)))
    step.model.train()
    return sum(losses) / len(losses)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _cut(batch: Any, samples: int | None) -> Any:
    if samples is None:
        return batch
    return tree_map(
        lambda leaf: leaf[:samples] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch
    )
