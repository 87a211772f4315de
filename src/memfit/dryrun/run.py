"""`memfit.dry_run`: the dry run from Python, of a script or of a workload."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.repeats import with_other_answers
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.script import run_script
from memfit.dryrun.worker import Worker, preload_for

# By name: workloads are read and measured by a part above this one, in a process of its own.
_MEASURE = "memfit.capture.measure:measure"
_REFERENCES = "memfit.capture.workloads"
_SPEC = re.compile(r"(hf|tv):|[^\s:]+\.py:\w+$")


def dry_run(
    target: Workload | str | Sequence[str],
    *,
    gpu: GPU | str,
    steps: int | Literal["all"] = 3,
    trace: str | None = None,
    repeats: int | None = None,
    **settings: Any,
) -> DryRunResult:
    """Run a script or a workload on a made-up GPU and account for its memory.

    Args:
        target: a command line, as text or as words (``"train.py --lr 1"``, ``["torchrun", "train.py"]``); or
            a workload, or the text that names one (``"hf:gpt2,batch=8"``, ``"train.py:workload"``).
        gpu: the GPU to make up, or its name (see ``memfit gpus``).
        steps: optimizer steps to run; ``"all"``, for a script, runs it to its end.
        trace: save memfit's trace of the run in this file.
        repeats: run again so often at most, with other answers where values are read that are not known;
            None: a few times, where they certainly matter.
        settings: of a script, as `memfit.dryrun.script.run_script` takes them: ``gpus``, ``world_size``,
            ``rank`` (a number or ``"all"``), ``nproc_per_node``, ``snapshot``,
            ``allow_writes``, ``timeout_seconds``, ``output``.

    Returns:
        The account. Out of memory is a value (``result.oom``), and so is a script that fails.

    Raises:
        UsageError, InputError: what was asked for cannot be run.
        CannotRunHere: this machine cannot make up a GPU.
        WorkloadFailed: the workload raised.
        ToolFailure: the process was killed.

    Examples:
        >>> import memfit
        >>> result = memfit.dry_run("train.py --lr 1", gpu="a100-80gb")  # doctest: +SKIP
        >>> result.fits  # doctest: +SKIP
        True
    """
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if isinstance(target, Workload) or (isinstance(target, str) and _SPEC.match(target)):
        if settings or steps == "all":
            given = ", ".join(settings) or "steps='all'"
            raise UsageError(f"{given}: for scripts only; a workload takes gpu, steps, trace and repeats")
        return _run_workload(target, chosen, int(steps), trace, repeats)
    words = shlex.split(target) if isinstance(target, str) else list(target)
    return run_script(words, gpu=chosen, steps=steps, trace=trace, repeats=repeats, **settings)


def _run_workload(
    target: Workload | str, gpu: GPU, steps: int, trace: str | None, repeats: int | None
) -> DryRunResult:
    spec = target if isinstance(target, str) else target.spec
    with Worker(gpu, preload=preload_for(spec)) as worker:  # it loads torch while this process does
        references = importlib.import_module(_REFERENCES)
        workload = references.load_workload(target) if isinstance(target, str) else target
        reference: Mapping[str, Any] = references.workload_reference(workload)

        def measure(**more: Any) -> DryRunResult:
            figures = worker.call(
                _MEASURE, workload=reference, gpu_key=gpu.key, steps=steps, costs=False, **more
            )
            return DryRunResult.from_measure(figures)

        first = measure(categories=True, trace_path=trace)
        return with_confidence(
            with_other_answers(first, lambda answers: measure(answers=dict(answers)), most=repeats)
        )
