"""Capture: a workload's training step as a graph of operators and storage lives, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.capture.graph import StepGraph
    from memfit.core.devices import GPU
    from memfit.core.workload import Workload

__all__ = ["capture_step"]


def capture_step(
    workload: Workload | str, *, gpu: GPU | str | None = None, device: str = "cpu", micro_batches: int = 1
) -> StepGraph:
    """The graph of the third training step of ``workload``, when the optimizer's state exists.

    Args:
        workload: a `Workload`, or a text that `memfit.capture.workloads.load_workload` takes.
        gpu: capture on this made-up GPU, in a process of its own: PyTorch then chooses the CUDA operators it
            would choose there.
        device: without ``gpu``, where to build and run the step in this process: ``"cpu"``, ``"cuda"`` or
            ``"meta"``.
        micro_batches: into how many parts to split the batch.

    Raises:
        UsageError: the step differentiates its own gradients, or the workload's text cannot be meant.
        WorkloadFailed: the user's code raised in the other process.
        ToolFailure: the step does not fit the made-up GPU.
        CannotRunHere: no made-up GPU on this machine.
    """
    from memfit.capture.workloads import load_workload, workload_reference

    chosen = load_workload(workload) if isinstance(workload, str) else workload
    if gpu is not None:
        return _captured_on_gpu(workload_reference(chosen), gpu, micro_batches, chosen.spec)
    from memfit.capture.step import build_step
    from memfit.capture.tracker import capture

    return capture(build_step(chosen, device=device, micro_batches=micro_batches))


def _captured_on_gpu(
    reference: dict[str, object], gpu: GPU | str, micro_batches: int, spec: str | None
) -> StepGraph:
    from memfit.capture.graph import StepGraph
    from memfit.core.devices import find_gpu
    from memfit.core.errors import ToolFailure
    from memfit.dryrun.worker import Worker, preload_for

    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    with Worker(device, preload=preload_for(spec)) as worker:
        data = worker.call(
            "memfit.capture.measure:capture_reference", workload=reference, micro_batches=micro_batches
        )
    if "oom" in data:
        raise ToolFailure(f"the step does not fit {device.name}: {data['oom']['message']}")
    return StepGraph.from_json(data)
