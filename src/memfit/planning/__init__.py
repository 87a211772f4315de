"""Planning: from a workload, a GPU and a budget to techniques that make the step fit at the least cost in
time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.core.exactness import Exactness
from memfit.planning.plan import FitResult, Plan

if TYPE_CHECKING:
    import os

    from memfit.core.devices import GPU
    from memfit.core.workload import Workload
    from memfit.planning.oracle import Engine

__all__ = ["FitResult", "Plan", "plan"]


def plan(
    workload: Workload | str,
    *,
    gpu: GPU | str,
    budget: int | str | None = None,
    allow: Exactness = "exact",
    verify: bool = True,
    progress: Any = None,
    engine: Engine = "auto",
    traces: str | os.PathLike[str] | None = None,
    seed: int = 0,
    compiled: bool = False,
    host_memory: int | str | None = None,
) -> FitResult:
    """Find the fastest way to run the workload's training step within ``budget`` on ``gpu``.

    Args:
        workload: a `Workload`, or its text: ``"hf:gpt2,batch=8,seq=1024"``, ``"train.py:workload"``.
        gpu: the GPU, or its name (``"rtx3060-12gb"``, ``"24GiB,sm89"``).
        budget: what the allocator may reserve, as bytes or text (``"8GiB"``); default: what the GPU has, less
            the CUDA context and 2 %.
        allow: how far results may move: ``"exact"`` (bitwise the same gradients), ``"reordered"`` (the same
            mathematics in another floating-point order) or ``"approximate"``.
        verify: run plain and planned steps on real values, scaled down, on the CPU, and compare.
        progress: called with ``(stage, done, total)`` as the search goes on.
        engine: ``"dryrun"``, ``"portable"``, or ``"auto"``: the dry run where it is possible.
        traces: folder for the traces of the plain and the planned step; default: a temporary one.
        seed: of everything random in the workload.
        compiled: try plans of ``torch.compile`` too: its graph cut so that chosen operators run again.
        host_memory: of the host, that plans which offload may use, as bytes or text; 0: none is offloaded.
            Default: as much as they need.

    Returns:
        What was found. That nothing fits is a result too (``fits`` is False), with the least budget that
        would do.

    Raises:
        UsageError: an unknown GPU, an impossible budget, a workload's text that means nothing.
        WorkloadFailed: the workload's own code raised.
        CannotRunHere: an engine was asked for that this machine cannot run.

    Examples:
        >>> result = plan("hf:gpt2,batch=8,seq=1024", gpu="rtx3060-12gb", budget="8GiB")  # doctest: +SKIP
        >>> result.plan.save("plan.json")  # doctest: +SKIP
    """
    from memfit.planning.fit import fit

    return fit(
        workload,
        gpu=gpu,
        budget=budget,
        allow=allow,
        verify=verify,
        progress=progress,
        engine=engine,
        traces=traces,
        seed=seed,
        compiled=compiled,
        host_memory=host_memory,
    )
