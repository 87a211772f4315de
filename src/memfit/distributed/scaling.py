"""`memfit.scale`: one workload on 1, 2, 4 … GPUs by each strategy and plan, and the least number that fits.

Of each case the dry run makes the rank that needs most, by the same `wrap` that real ranks call, on a roomy
GPU, so that what does not fit is measured as well. Parent side, without torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import MemfitError, UsageError
from memfit.core.exactness import Exactness, checked_grade
from memfit.distributed.scaling_plans import Planner
from memfit.distributed.scaling_values import Batch, PlanName, ScaleCase, ScaleResult, best_of
from memfit.distributed.strategies import DEFAULT_NAMES, Strategy, strategies_for
from memfit.distributed.verification import PARALLEL_LIBRARIES, VerifiedOnRanks, Verifier
from memfit.dryrun.worker import Worker
from memfit.dryrun.world import World
from memfit.planning.fit import checked_budget, workload_and_spec
from memfit.planning.oracle import ROOMY_BYTES, gpu_json, preload

if TYPE_CHECKING:
    from memfit.core.workload import Workload

Progress = Callable[..., None]
"""``progress(text, done=None, total=None)``."""

DEFAULT_GPUS = (1, 2, 4, 8)
PLANS: tuple[PlanName, ...] = get_args(PlanName)
RANK_SECONDS = 600.0
FULL_CHECKPOINTING: tuple[Mapping[str, Any], ...] = ({"technique": "gradient_checkpointing"},)
NCCL_NOTE = "NCCL: 0.6 GB for each communicator, an estimate (0.5 to 0.7 GB are seen)"
BATCH_NOTES: Mapping[str, str] = {
    "whole": "the workload's batch is divided among the GPUs, so every row trains the same (--batch each: "
    "every GPU has as much); GPUs that share layers share samples",
    "each": "every GPU has the workload's whole batch, so more GPUs train on more samples a step; GPUs that "
    "share layers share samples",
}


def scale(
    workload: Workload | str,
    *,
    gpu: GPU | str,
    gpus: Sequence[int] = DEFAULT_GPUS,
    budget: int | str | None = None,
    strategies: Sequence[str] = DEFAULT_NAMES,
    plans: Sequence[str] = PLANS,
    batch: Batch = "whole",
    allow: Exactness = "exact",
    link_bytes_per_second: float | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    seed: int = 0,
) -> ScaleResult:
    """Compare ways to train a workload on several GPUs, and say how many are needed.

    Args:
        workload: a `Workload`, or its text: ``"hf:gpt2,batch=8,seq=1024"``, ``"train.py:workload"``.
        gpu: one of the GPUs, all alike, or its name.
        gpus: how many to try.
        budget: what PyTorch may reserve on each; default: what a GPU has, less context, NCCL and 2 %.
        strategies: names that `memfit.distributed.wrap` takes; ``"tp"`` stands for every degree up to 8.
        plans: of ``"plain"``, ``"full"`` (checkpointing of every block) and ``"planned"`` (what `memfit.plan`
            finds, where the plain step does not fit).
        batch: ``"whole"``: the workload's batch is divided among the GPUs; ``"each"``: each has as much.
        allow: how far a plan may move results (see `memfit.plan`).
        link_bytes_per_second: between GPUs, one direction, for bounds of the step's time.
        verify: train the answer's strategy on real ranks (gloo, CPU, scaled down) and compare; tensor
            parallel is verified in any case: models may reshape by numbers of heads that are theirs no more.
        progress: called with a text, and done and total.
        seed: of everything random.

    Returns:
        The cases and the answer; that nothing fits is a result as well.

    Raises:
        UsageError: numbers, names or a budget that cannot be.
        WorkloadFailed: the workload's own code raised in its plain step on one GPU.
        CannotRunHere: no made-up GPU can be had on this machine.

    Examples:
        >>> result = scale("hf:gpt2,batch=8,seq=1024", gpu="rtx3060-12gb", gpus=[1, 2])  # doctest: +SKIP
        >>> result.least_gpus, result.best.title                                         # doctest: +SKIP
        (1, "one GPU with memfit's plan")
    """
    began = time.monotonic()
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    asked = Asked(
        gpu=device,
        counts=_checked_counts(gpus),
        budget_bytes=None if budget is None else checked_budget(budget, device),
        names=tuple(strategies),
        plans=_checked_plans(plans),
        whole_batch=_checked_batch(batch) == "whole",
        allow=checked_grade(allow),
        link_bytes_per_second=link_bytes_per_second,
        seed=seed,
    )
    for count in asked.counts:
        strategies_for(count, asked.names)  # refuses what is not known, before anything is run
    reference, spec = workload_and_spec(workload)
    with ExitStack() as stack:
        runner = stack.enter_context(Runner(asked, reference, spec))
        found = _Scaling(asked, runner, reference, spec, stack, progress or _silent).run(verify=verify)
    return replace(found, batch=batch, wall_seconds=time.monotonic() - began)


def _silent(text: str, done: int | None = None, total: int | None = None) -> None:
    """Shows nothing."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is compared, checked."""

    gpu: GPU
    counts: tuple[int, ...]
    budget_bytes: int | None
    names: tuple[str, ...]
    plans: tuple[PlanName, ...]
    whole_batch: bool
    allow: Exactness
    link_bytes_per_second: float | None
    seed: int

    def limit_bytes(self, libraries_bytes: int) -> int:
        """What PyTorch may reserve beside so much of libraries."""
        room = self.gpu.runtime_total_bytes - self.gpu.context_bytes - libraries_bytes
        if self.budget_bytes is None:
            return min(room, self.gpu.default_budget_bytes - libraries_bytes)
        return min(room, self.budget_bytes)


class Runner:
    """The worker from which ranks are forked, each on the made-up GPU for itself."""

    def __init__(self, asked: Asked, reference: Mapping[str, Any], spec: str | None) -> None:
        self._asked, self._reference = asked, reference
        roomy = replace(asked.gpu, runtime_total_bytes=ROOMY_BYTES, nvml_total_bytes=ROOMY_BYTES)
        loaded = preload(spec, "memfit.distributed.rank_step")
        self._worker = Worker(roomy, preload=(*loaded, *PARALLEL_LIBRARIES))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def plain_on_one(self) -> dict[str, Any]:
        """The plain step on one GPU, whose errors are the workload's own."""
        return self._call(Strategy(ranks=1, data=None), (), 0, None)

    def case(self, strategy: Strategy, plan: PlanName, techniques: Sequence[Mapping[str, Any]]) -> ScaleCase:
        """The rank that needs most; what goes wrong is the case's problem."""
        case = ScaleCase(gpus=strategy.ranks, strategy=strategy.name, plan=plan, techniques=tuple(techniques))
        try:
            figures, rank = self._call(strategy, techniques, 0, None), 0
            heaviest = figures.get("heaviest_rank")
            if heaviest:
                other = self._call(strategy, techniques, heaviest, None)
                if other["peak_reserved_bytes"] > figures["peak_reserved_bytes"]:
                    figures, rank = other, heaviest
            return self._judged(replace(case, rank=rank), strategy, figures)
        except MemfitError as error:
            return replace(case, problem=str(error).split("\n")[0])

    def _judged(self, case: ScaleCase, strategy: Strategy, figures: Mapping[str, Any]) -> ScaleCase:
        """Figures and verdict; where only cached memory is too much, by a run on a GPU of the real size."""
        if figures["oom"]:
            return replace(case, problem=f"needs more than {ROOMY_BYTES >> 40} TiB")
        measured = self._filled(case, figures)
        if measured.fits or measured.peak_allocated_bytes > measured.limit_bytes:
            return measured
        gpu, taken = self._asked.gpu, measured.libraries_bytes + self._asked.gpu.context_bytes
        small = replace(gpu, runtime_total_bytes=measured.limit_bytes + taken)
        again = self._call(strategy, case.techniques, case.rank, small)
        if again["oom"]:
            return measured
        return replace(self._filled(case, again), tight=True)

    def _filled(self, case: ScaleCase, figures: Mapping[str, Any]) -> ScaleCase:
        names = ("peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "libraries_bytes")
        limit = self._asked.limit_bytes(figures["libraries_bytes"])
        total = figures["device_total_bytes"]
        collectives = {kind: tuple(numbers) for kind, numbers in figures.get("collectives", {}).items()}
        filled = replace(
            case,
            **{name: figures[name] for name in names},
            samples=figures["samples"],
            device_total_bytes=total,
            limit_bytes=limit,
            fits=figures["peak_reserved_bytes"] <= limit and total <= self._asked.gpu.nvml_total_bytes,
            flops=figures.get("flops", 0),
            compute_seconds=figures.get("compute_seconds"),
            collectives=collectives,
        )
        return replace(filled, step_seconds_bounds=self._bounds(filled))

    def _bounds(self, case: ScaleCase) -> tuple[float, float] | None:
        speed, compute = self._asked.link_bytes_per_second, case.compute_seconds
        if speed is None or compute is None:
            return None
        sending = case.sent_bytes / speed
        return max(compute, sending), compute + sending

    def _call(
        self, strategy: Strategy, techniques: Sequence[Mapping[str, Any]], rank: int, gpu: GPU | None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self._worker.call(
            "memfit.distributed.rank_step:measure_rank",
            gpu=gpu,
            timeout_seconds=RANK_SECONDS,
            workload=dict(self._reference),
            target=gpu_json(self._asked.gpu),
            strategy=strategy.name,
            ranks=strategy.ranks,
            rank=rank,
            techniques=list(techniques),
            whole_batch=self._asked.whole_batch,
            seed=self._asked.seed,
        )
        return answer


@dataclass
class _Scaling:
    """One run of `scale`."""

    asked: Asked
    runner: Runner
    reference: Mapping[str, Any]
    spec: str | None
    stack: ExitStack
    show: Progress

    def run(self, *, verify: bool) -> ScaleResult:
        self.show("running the plain step on one GPU")
        plain = self.runner.plain_on_one()
        if plain.get("oom"):
            raise UsageError(f"the plain step needs more than {ROOMY_BYTES >> 40} TiB on one GPU")
        cases = self._known_plans()
        if "planned" in self.asked.plans:
            cases = self._with_plans(cases)
        cases, verified = self._verified(cases, verify)
        order = {name: number for number, name in enumerate(PLANS)}
        places = {
            strategy: number for number, strategy in enumerate(dict.fromkeys(c.strategy for c in cases))
        }
        cases = sorted(cases, key=lambda c: (c.gpus, places[c.strategy], order[c.plan]))
        multiple = any(case.gpus > 1 for case in cases)
        return ScaleResult(
            workload=plain["name"],
            workload_spec=self.spec,
            gpu=self.asked.gpu.key,
            budget_bytes=self.asked.budget_bytes,
            batch="whole",
            samples=plain["samples"],
            nvml_total_bytes=self.asked.gpu.nvml_total_bytes,
            context_bytes=self.asked.gpu.context_bytes,
            cases=tuple(cases),
            verified=tuple(verified),
            link_bytes_per_second=self.asked.link_bytes_per_second,
            notes=(BATCH_NOTES["whole" if self.asked.whole_batch else "each"], NCCL_NOTE) if multiple else (),
        )

    def _known_plans(self) -> list[ScaleCase]:
        """Plain, and full checkpointing, by every strategy: as many at once as there are processors."""
        jobs: list[tuple[Strategy, PlanName, tuple[Mapping[str, Any], ...]]] = [
            (strategy, plan, techniques)
            for count in self.asked.counts
            for strategy in strategies_for(count, self.asked.names)
            for plan, techniques in (("plain", ()), ("full", FULL_CHECKPOINTING))
            if plan in self.asked.plans
        ]
        cases = []
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            for case in pool.map(lambda job: self.runner.case(*job), jobs):
                cases.append(case)
                self.show("running a rank of each", len(cases), len(jobs))
        return cases

    def _with_plans(self, cases: list[ScaleCase]) -> list[ScaleCase]:
        """Plans for the fewest GPUs, where the plain step does not fit: there they change the answer."""
        found = list(cases)
        planner = self.stack.enter_context(Planner(self.asked, self.runner, self.reference, self.spec))
        for count in self.asked.counts:
            here = [c for c in found if c.gpus == count and c.plan == "plain" and c.problem is None]
            wanting = [case for case in here if not case.fits and case.strategy in planner.STRATEGIES]
            for case in wanting:
                self.show(f"planning for {count} {'GPU' if count == 1 else 'GPUs'}, {case.strategy}")
                full = (c for c in found if (c.gpus, c.strategy, c.plan) == (count, case.strategy, "full"))
                found.append(planner.planned(case, next(full, None)))
            if any(case.fits for case in found if case.gpus == count):
                break  # more GPUs are not needed
        return found

    def _verified(
        self, cases: list[ScaleCase], verify: bool
    ) -> tuple[list[ScaleCase], list[VerifiedOnRanks]]:
        """Real steps of tensor parallel where it ran, and of the answer's strategy and plan."""
        shown: list[VerifiedOnRanks] = []
        ran = [c for c in cases if c.strategy.startswith("tp") and c.problem is None]
        if not ran and not verify:
            return cases, shown
        with ExitStack() as stack:
            verifier: Verifier | None = None

            def checked(case: ScaleCase) -> VerifiedOnRanks:
                nonlocal verifier
                self.show(f"training on real ranks: {case.title}")
                if verifier is None:
                    verifier = stack.enter_context(Verifier(self.reference, self.asked.seed))
                return verifier.verify(*_smaller(case.strategy), case.techniques)

            if ran:
                shown.append(checked(ran[0]))
                if not shown[0].passed:
                    problem = f"not to be used: {shown[0]}"
                    cases = [replace(c, problem=problem, fits=False) if c in ran else c for c in cases]
            best = best_of(cases)
            known = any(best is not None and best.strategy == one.strategy for one in shown)
            if verify and best is not None and best.gpus > 1 and not (known and not best.techniques):
                shown.append(checked(best))
        return cases, shown


def _smaller(strategy: str) -> tuple[str, int]:
    """The same in small: two ranks, or two groups of two."""
    if strategy.startswith("tp"):
        _, plus, rest = strategy.partition("+")
        return (f"tp2+{rest}", 4) if plus else ("tp2", 2)
    return strategy, 4 if strategy == "hsdp" else 2


def _checked_counts(gpus: Sequence[int]) -> tuple[int, ...]:
    if not gpus:
        raise UsageError("gpus: name how many to try, like 1,2,4,8")
    for count in gpus:
        if isinstance(count, bool) or not isinstance(count, int):
            raise UsageError(f"gpus: {count!r} is not a number of GPUs")
        World.of(count)
    return tuple(sorted(set(gpus)))


def _checked_plans(plans: Sequence[str]) -> tuple[PlanName, ...]:
    for name in plans:
        if name not in PLANS:
            raise UsageError(f"plan {name!r} is not known: use {', '.join(PLANS)}")
    return tuple(name for name in PLANS if name in {*plans, "plain"})


def _checked_batch(batch: str) -> str:
    if batch not in get_args(Batch):
        raise UsageError(f"batch={batch!r}: use {' or '.join(get_args(Batch))}")
    return batch
