"""The other questions of `memfit fit`: the largest batch or sequence, the cheapest GPU, generation.

(The whole front is in `memfit.cli.fit_sweep`.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.console import print_json, progress, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memfit.cli.fit import Asked, Dimension
    from memfit.planning.gpus import CheapestResult
    from memfit.planning.sizes import LargestResult


def run_question(
    asked: Asked,
    *,
    sweep: bool,
    maximize: Dimension | None,
    inference: bool,
    new_tokens: int,
    points: int,
    as_json: bool,
) -> int:
    """Answers the one question that was asked. UsageError where two were."""
    questions = {
        "--sweep": sweep,
        "--maximize": maximize is not None,
        "--gpu any": asked.gpu == "any",
        "--inference": inference,
    }
    both = [name for name, there in questions.items() if there]
    if len(both) > 1 and set(both) != {"--maximize", "--inference"}:
        raise UsageError(f"{' and '.join(both)}: ask one of them at a time")
    if asked.compiled:
        raise UsageError(f"--compile plans for one budget: leave out {' and '.join(both)}, or --compile")
    if inference:
        from memfit.cli.fit_inference import run_inference

        what = None if maximize is None else maximize.value
        return run_inference(asked, maximize=what, new_tokens=new_tokens, as_json=as_json)
    if sweep:
        from memfit.cli.fit_sweep import run_sweep

        return run_sweep(asked, points=points, as_json=as_json)
    with tempfile.TemporaryDirectory(prefix="memfit-") as traces:
        if maximize is not None:
            return _largest(asked, maximize.value, Path(traces), as_json=as_json)
        return _cheapest(asked, Path(traces), as_json=as_json)


def _largest(asked: Asked, dimension: Any, traces: Path, *, as_json: bool) -> int:
    from memfit.planning.sizes import largest

    with progress(quiet=as_json) as update:
        update("loading torch and the workload")
        result = largest(
            asked.workload,
            dimension,
            gpu=asked.gpu,
            budget=asked.budget,
            allow=asked.allow.value,
            verify=asked.verify,
            engine=asked.engine.value,
            traces=traces,
            progress=lambda stage, done, total: update(_STAGES.get(stage, stage), done, total),
        )
    return _answer(asked, result, _largest_text(result), as_json=as_json)


def _cheapest(asked: Asked, traces: Path, *, as_json: bool) -> int:
    from memfit.planning.gpus import cheapest

    if asked.budget is not None:
        raise UsageError("--budget is for one GPU: with --gpu any each has its own, leave one of the two out")
    with progress(quiet=as_json) as update:
        update("loading torch and the workload")
        result = cheapest(
            asked.workload,
            allow=asked.allow.value,
            verify=asked.verify,
            engine=asked.engine.value,
            traces=traces,
            progress=lambda stage, done, total: update(_STAGES.get(stage, stage), done, total),
        )
    return _answer(asked, result, _cheapest_text(result), as_json=as_json)


_STAGES: Mapping[str, str] = {
    "sizes": "asking whether a size fits",
    "gpus": "asking whether a GPU has room",
    "plain step": "running the plain step",
    "options": "measuring what blocks can keep",
    "plans": "trying plans",
    "finalists": "running the best plans in processes of their own",
    "lower bound": "proving how little must be computed again",
    "advice": "running other trainings, as nothing that keeps this one fits",
    "verify": "comparing plain and planned steps on real values",
}


def _answer(
    asked: Asked, result: LargestResult | CheapestResult, text: RenderableType, *, as_json: bool
) -> int:
    """The answer, then the plan behind it as `memfit fit` shows it."""
    from memfit.cli.fit import finish

    whole = result.to_json()
    answer = {"answer": {key: value for key, value in whole.items() if key not in ("fit", "schema_version")}}
    if result.fit is None:
        if as_json:
            print_json(whole | answer)
        else:
            show(text)
        return EXIT_DOES_NOT_FIT
    if not as_json:
        show(text)
    return finish(asked, result.fit, as_json=as_json, answer=answer)


def _largest_text(result: LargestResult) -> RenderableType:
    from rich.text import Text

    names = {"batch": "batch", "seq": "sequence"}
    what = names[result.dimension]
    superlative = "largest" if result.dimension == "batch" else "longest"
    if result.size is None:
        return Text(f"No {what} fits: {result.limit}.\n", style="bold")
    now = "" if result.asked_size is None else f" (the workload has {result.asked_size})"
    text = Text(f"The {superlative} {what} that fits is {result.size}{now}.", style="bold")
    text.append(f"\nOne more: {result.limit}. {len(result.tried)} sizes were tried; the plan for this one:\n",
                style="not bold dim")  # fmt: skip
    return text


def _cheapest_text(result: CheapestResult) -> RenderableType:
    from rich.text import Text

    from memfit.core.units import format_bytes

    if result.gpu is None:
        head = Text("It fits on no GPU of the catalogue.", style="bold")
    else:
        head = Text(f"The cheapest GPU on which it fits is {result.gpu}.", style="bold")
    head.append(f"\nAsked in this order: {result.criterion}.\n", style="not bold dim")
    for one in result.tried:
        mark = "✓" if one.fits else "✗"
        has, needs = format_bytes(one.budget_bytes), format_bytes(one.least_reserved_bytes)
        head.append(
            f"  {mark} {one.gpu}: {has} to give, the leanest plan reserves {needs}\n", style="not bold"
        )
    return head
