"""`verify`: does a workload train on several ranks, with a strategy and a plan, as it does in one process?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.errors import MemfitError, UsageError
from memfit.distributed.strategies import strategy_named
from memfit.dryrun.worker import Worker
from memfit.planning.fit import VERIFY_SECONDS, workload_and_spec
from memfit.planning.oracle import preload

if TYPE_CHECKING:
    from memfit.core.workload import Workload
    from memfit.planning.plan import Plan

MOST_RANKS = 8
PARAMETER_TOLERANCE = 1e-2
"""Adam makes a step of full length of any gradient, also of one that is rounding only: parameters say less
than gradients, but a part of the state or an update that is missing shows."""
PARALLEL_LIBRARIES = (
    "?torch.distributed.fsdp",
    "?torch.distributed.tensor.parallel",
    "?torch.distributed.optim",
    "?torch.nn.parallel",
)
"""What ranks import; loaded before the first fork."""


@dataclass(frozen=True, kw_only=True)
class VerifiedOnRanks:
    """What real steps on several ranks, against one process, showed.

    Attributes:
        strategy, ranks: what was run.
        passed: every rank's gradients and parameters are those of one process within the tolerances; None
            where nothing could be run (``reason``).
        ranks_agree: all ranks have the same gradients and parameters, bit for bit.
        bitwise: nothing differed from one process at all.
        max_relative_error: the largest, of the size of each gradient, over all ranks.
        parameter_error: of all parameters together after the last step; at most `PARAMETER_TOLERANCE`.
        tolerance: what ``max_relative_error`` may be.
        steps: optimizer steps that were compared.
        scale: how the workload was scaled down.
        differences: names of tensors that differ by more than the tolerance allows, the first eight.
        reason: why it could not be run, or what made it differ, if that is known.
        wall_seconds: of the whole comparison.
    """

    strategy: str
    ranks: int
    passed: bool | None
    ranks_agree: bool = True
    bitwise: bool = False
    max_relative_error: float | None = None
    parameter_error: float | None = None
    tolerance: float = 0.0
    steps: int = 0
    scale: str = ""
    differences: tuple[str, ...] = ()
    reason: str | None = None
    wall_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {**vars(self), "differences": list(self.differences)}

    def __str__(self) -> str:
        head = f"{self.strategy} on {self.ranks} ranks"
        if self.passed is None:
            return f"{head}: not verified: {self.reason}"
        if self.passed:
            how = "bit for bit" if self.bitwise else f"within {self.max_relative_error:.0e}"
            return f"{head} trains as one process does, {how} ({self.steps} real steps, gloo; {self.scale})"
        what = f" in {', '.join(self.differences[:2])}" if self.differences else ""
        why = f": {self.reason}" if self.reason else ""
        error = f"{max(self.max_relative_error or 0.0, self.parameter_error or 0.0):.1g} of its size"
        return f"{head} differs from one process by {error}{what}{why}"


def verify(
    workload: Workload | str,
    *,
    strategy: str = "ddp",
    ranks: int = 2,
    plan: Plan | None = None,
    seed: int = 0,
) -> VerifiedOnRanks:
    """Train a few real steps on several ranks (processes, gloo, CPU) and in one process, and compare all.

    The ranks have a strategy and a plan as `wrap` puts them on; the one process is plain. Each rank has its
    part of the batch. The workload is scaled down as `memfit.plan`'s own verification does: its small form,
    or two samples a rank. Dropout is off, as ranks draw other masks.

    Args:
        workload: a `Workload`, or its text.
        strategy: a name that `wrap` takes.
        ranks: processes to start.
        plan: whose techniques the ranks have.
        seed: of everything random.

    Raises:
        UsageError: numbers or a strategy that cannot be.

    Examples:
        >>> from memfit.distributed import verify
        >>> print(verify("hf:gpt2", strategy="fsdp2"))                   # doctest: +SKIP
        fsdp2 on 2 ranks trains as one process does, within 2e-07 (3 real steps, gloo; …)
    """
    reference, _ = workload_and_spec(workload)
    with Verifier(reference, seed) as verifier:
        return verifier.verify(strategy, ranks, () if plan is None else plan.techniques)


class Verifier:
    """The process from which ranks are forked, started early so that torch is loaded when it is asked."""

    def __init__(self, reference: Mapping[str, Any], seed: int) -> None:
        self._reference, self._seed = reference, seed
        loaded = preload(reference.get("spec"), "memfit.distributed.verification_rank")
        self._worker = Worker(None, preload=(*loaded, *PARALLEL_LIBRARIES))

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def verify(self, strategy: str, ranks: int, techniques: Sequence[Mapping[str, Any]]) -> VerifiedOnRanks:
        """Runs the ranks; one that fails is a reason, not an error. Raises UsageError as `verify` does."""
        if not 2 <= ranks <= MOST_RANKS:
            raise UsageError(f"ranks={ranks}: ask for 2 to {MOST_RANKS} processes")
        chosen = strategy_named(strategy, ranks)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="memfit-ranks-") as folder:
            store = str(Path(folder) / "store")

            def one(rank: int) -> dict[str, Any]:
                answer: dict[str, Any] = self._worker.call(
                    "memfit.distributed.verification_rank:verify_rank",
                    timeout_seconds=VERIFY_SECONDS,
                    workload=self._reference,
                    techniques=list(techniques),
                    strategy=chosen.name,
                    ranks=ranks,
                    rank=rank,
                    store=store,
                    seed=self._seed,
                )
                return answer

            try:
                with ThreadPoolExecutor(max_workers=ranks) as pool:
                    answers = list(pool.map(one, range(ranks)))
            except MemfitError as error:
                return VerifiedOnRanks(strategy=chosen.name, ranks=ranks, passed=None, reason=str(error))
        return _together(answers, chosen.name, ranks, time.monotonic() - began)


def _together(
    answers: Sequence[Mapping[str, Any]], strategy: str, ranks: int, wall_seconds: float
) -> VerifiedOnRanks:
    failed = [answer["reason"] for answer in answers if answer.get("failed")]
    if failed:
        return VerifiedOnRanks(
            strategy=strategy, ranks=ranks, passed=None, reason=failed[0], wall_seconds=wall_seconds
        )
    worst = max(answers, key=lambda answer: float(answer["error"]))
    moved = max(float(answer["parameter_error"]) for answer in answers)
    agree = all(answer["ranks_agree"] for answer in answers)
    return VerifiedOnRanks(
        strategy=strategy,
        ranks=ranks,
        passed=agree and worst["error"] <= worst["tolerance"] and moved <= PARAMETER_TOLERANCE,
        ranks_agree=agree,
        bitwise=all(answer["bitwise"] for answer in answers),
        max_relative_error=worst["error"],
        parameter_error=moved,
        tolerance=worst["tolerance"],
        steps=worst["steps"],
        scale=worst["scale"],
        differences=tuple(worst["differences"]),
        reason=worst["reason"],
        wall_seconds=wall_seconds,
    )
