"""What `memfit fit --config` takes from the ``planning`` section where the command line does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is planned, for which GPU, within how much (``None``: what the GPU has to give)."""

    workload: str
    gpu: str
    budget: str | None


def target(
    workload: str | None,
    gpu: str | None,
    budget: str | None,
    *,
    places: Sequence[Path] = (),
    takes_budget: bool = True,
) -> Target:
    """The command line's values, and those of the configuration in ``places`` for what it leaves out.

    Args:
        workload, gpu, budget: as typed; ``None`` where they were not.
        places: YAML files, or folders of them; without any, environment variables are not read either.
        takes_budget: whether the question has one budget: the configured one is left out otherwise.

    Raises:
        InputError: a mistake in a file, with its line.
        UsageError: a wrong variable, or neither place says what to plan and for which GPU.
    """
    if places:
        from memfit.config import load_configuration

        asked = load_configuration(*places).settings.planning
        workload = workload if workload is not None else asked.workload
        gpu = gpu if gpu is not None else asked.gpu
        if budget is None and asked.memory_budget is not None and takes_budget and gpu != "any":
            budget = str(asked.memory_budget)
    if workload is None:
        raise UsageError("Missing argument WORKLOAD: like hf:gpt2,batch=8, or planning.workload in --config")
    if gpu is None:
        raise UsageError("Missing option --gpu: a name from memfit gpus, or planning.gpu in --config")
    return Target(workload=workload, gpu=gpu, budget=budget)
