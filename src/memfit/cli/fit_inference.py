"""`memfit fit --inference`: does generation fit, with which cache, and how much of it would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.cli.fit import Asked


def run_inference(asked: Asked, *, maximize: str | None, new_tokens: int, as_json: bool) -> int:
    """Measures generation with each kind of cache; exit code 0 where one fits, else 4."""
    from memfit.planning.inference import generation
    from memfit.reports.generation import generation_text

    if asked.report is not None or asked.plan_file is not None or asked.png is not None:
        raise UsageError("--report, --plan and --png are for training: --inference changes nothing to apply")
    with progress(quiet=as_json) as update:
        update("loading torch and the model")
        result = generation(
            asked.workload,
            gpu=asked.gpu,
            budget=asked.budget,
            new_tokens=new_tokens,
            maximize=maximize,
            engine=asked.engine.value,
            progress=update,
        )
    if as_json:
        print_json(result.to_json())
    else:
        show(generation_text(result))
    return 0 if result.fits else EXIT_DOES_NOT_FIT
