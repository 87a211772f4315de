"""Plans for a rank: the planner works on one GPU, so it gets the budget that the rank's would be there.

What a rank has less (or more) than one GPU with the same samples are parameters, gradients, state and
buffers, which recomputing does not touch. So the planner's budget is the rank's, and that difference; the
rank with the plan is then run, and where it takes more than it may, the budget is lowered by as much and
planned again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.errors import MemfitError
from memfit.distributed.scaling_values import ScaleCase
from memfit.distributed.strategies import Strategy, strategy_named
from memfit.planning.bench import Try
from memfit.planning.oracle import StepOracle, open_oracle
from memfit.planning.search import Search

if TYPE_CHECKING:
    from memfit.distributed.scaling import Asked, Runner

ROUNDS = 2
NONE_FITS = "no plan that was tried fits"
HOPELESS_SHARE = 1.25
HOPELESS = (
    "no plan was sought: full checkpointing needs over a quarter more than there is, and exact plans are "
    "hardly leaner (--allow reordered has more levers)"
)


class Planner:
    """Finds plans for cases whose plain step does not fit. Use it in a ``with`` block."""

    STRATEGIES = ("one GPU", "ddp", "fsdp2")
    """Those that plans are sought for: the usual ones; others differ from them by little."""

    def __init__(self, asked: Asked, runner: Runner, reference: Mapping[str, Any], spec: str | None) -> None:
        self._asked, self._runner, self._reference, self._spec = asked, runner, reference, spec
        self._stack = ExitStack()
        self._oracles: dict[int, StepOracle] = {}

    def __enter__(self) -> Planner:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def planned(self, plain: ScaleCase, full: ScaleCase | None) -> ScaleCase:
        """The case with a plan; its ``problem`` says where there is none.

        Args:
            plain: what does not fit.
            full: the same with every block checkpointed, if it was run: what plans are held against.
        """
        strategy = (
            Strategy(ranks=1, data=None) if plain.gpus == 1 else strategy_named(plain.strategy, plain.gpus)
        )
        nothing = ScaleCase(gpus=plain.gpus, strategy=plain.strategy, plan="planned", problem=NONE_FITS)
        if self._hopeless(full):
            return replace(nothing, problem=HOPELESS)
        try:
            oracle = self._oracle(plain.samples)
            alone = oracle.evaluate(()).reserved_bytes
            budget = plain.limit_bytes + alone - plain.peak_reserved_bytes
            case = nothing
            for _ in range(ROUNDS):
                found = None if budget <= 0 else self._found(oracle, budget)
                if found is None:
                    return case
                case = self._runner.case(strategy, "planned", found.techniques)
                case = replace(case, exactness=found.lever.exactness)
                if case.fits or case.problem is not None:
                    return case
                budget -= case.peak_reserved_bytes - case.limit_bytes
            return case
        except MemfitError as error:
            return replace(nothing, problem=str(error).split("\n")[0])

    def _hopeless(self, full: ScaleCase | None) -> bool:
        """Exact plans are hardly leaner than checkpointing everything: no use in seeking them far below."""
        if full is None or full.problem is not None or self._asked.allow != "exact":
            return False
        return full.peak_requested_bytes > HOPELESS_SHARE * full.limit_bytes

    def _found(self, oracle: StepOracle, budget_bytes: int) -> Try | None:
        """The fastest plan within the budget; None where none fits."""
        search = Search(
            oracle=oracle, gpu=self._asked.gpu, budget_bytes=budget_bytes, allow=self._asked.allow
        )
        return search.run().chosen

    def _oracle(self, samples: int) -> StepOracle:
        if samples not in self._oracles:
            reference = {**self._reference, "samples": samples}
            opened = open_oracle(
                reference, self._spec, self._asked.gpu, self._folder, engine="dryrun", seed=self._asked.seed
            )
            self._oracles[samples] = self._stack.enter_context(opened)
        return self._oracles[samples]
